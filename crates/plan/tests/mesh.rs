//! Properties of the mesh: coordinates and ranks are one to one, groups along any axes tile the world, and index
//! expressions agree with explicit lists of ranks.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use shardwise_plan::{Axis, Mesh, MeshError, Partition, RankSet};

fn any_mesh() -> impl Strategy<Value = Mesh> {
    prop::collection::vec(1usize..4, Axis::ALL.len())
        .prop_map(|sizes| Mesh::new(&Axis::ALL.into_iter().zip(sizes).collect::<Vec<_>>()).unwrap())
}

fn any_axes() -> impl Strategy<Value = Vec<Axis>> {
    prop::sample::subsequence(Axis::ALL.to_vec(), 0..=Axis::ALL.len())
}

proptest! {
    #[test]
    fn ranks_and_coordinates_are_one_to_one(mesh in any_mesh()) {
        let all: BTreeSet<Vec<usize>> = (0..mesh.ranks())
            .map(|rank| {
                let coordinates = mesh.coordinates(rank);
                assert_eq!(mesh.rank(coordinates), rank);
                Axis::ALL.map(|axis| coordinates.along(axis)).to_vec()
            })
            .collect();
        // Ranks ascend with their coordinates, so the sorted coordinates are those of the ranks in order.
        prop_assert_eq!(all.len(), mesh.ranks());
        for (rank, coordinates) in all.iter().enumerate() {
            let expected = mesh.coordinates(rank);
            prop_assert_eq!(coordinates, &Axis::ALL.map(|axis| expected.along(axis)).to_vec());
        }
    }

    #[test]
    fn groups_tile_the_world(mesh in any_mesh(), axes in any_axes()) {
        let mut seen = vec![0usize; mesh.ranks()];
        for rank in 0..mesh.ranks() {
            let group = mesh.group(rank, &axes);
            prop_assert_eq!(group.len(), axes.iter().map(|&axis| mesh.size(axis)).product::<usize>());
            // Every member computes the same group.
            for member in group.iter() {
                prop_assert_eq!(mesh.group(member, &axes), group);
            }
            seen[group.first()] += 1;
        }
        let groups = seen.iter().filter(|&&count| count > 0).count();
        prop_assert_eq!(groups * mesh.group(0, &axes).len(), mesh.ranks());
    }

    #[test]
    fn a_group_matches_its_definition(mesh in any_mesh(), axes in any_axes(), seed in any::<usize>()) {
        let rank = seed % mesh.ranks();
        let here = mesh.coordinates(rank);
        let expected: Vec<usize> = (0..mesh.ranks())
            .filter(|&other| {
                let there = mesh.coordinates(other);
                Axis::ALL.iter().all(|axis| axes.contains(axis) || there.along(*axis) == here.along(*axis))
            })
            .collect();
        let group = mesh.group(rank, &axes);
        prop_assert_eq!(group.iter().collect::<Vec<_>>(), expected.clone());
        for other in 0..mesh.ranks() + 3 {
            prop_assert_eq!(group.index_of(other), expected.iter().position(|&member| member == other));
        }
        let listed: Vec<usize> =
            group.progressions().into_iter().flat_map(|(first, last, stride)| (first..=last).step_by(stride)).collect();
        prop_assert_eq!(listed, expected);
    }

    #[test]
    fn partitions_cover_everything_once(len in 0usize..5000, parts in 1usize..40) {
        let partition = Partition::new(len, parts);
        let mut next = 0;
        for index in 0..parts {
            let range = partition.range(index);
            prop_assert_eq!(range.start, next);
            prop_assert!(range.len() == len / parts || range.len() == len / parts + 1);
            next = range.end;
        }
        prop_assert_eq!(next, len);
        prop_assert_eq!(partition.is_even(), (0..parts).all(|index| partition.part_len(index) * parts == len));
    }
}

#[test]
fn neighbors_on_a_host_are_neighbors_along_the_tensor_axis() {
    let mesh = Mesh::new(&[(Axis::Shard, 2), (Axis::Tensor, 4)]).unwrap();
    assert_eq!(mesh.group(5, &[Axis::Tensor]).iter().collect::<Vec<_>>(), [4, 5, 6, 7]);
    assert_eq!(mesh.group(5, &[Axis::Shard]).iter().collect::<Vec<_>>(), [1, 5]);
}

#[test]
fn a_group_of_ten_thousand_is_as_small_as_a_group_of_two() {
    let mesh = Mesh::new(&[(Axis::Pipeline, 16), (Axis::Shard, 128), (Axis::Tensor, 8)]).unwrap();
    let group = mesh.group(16_383, &[Axis::Shard]);
    assert_eq!((group.len(), group.rank_at(127), group.progressions().len()), (128, 16_383, 1));
    // A start, and two numbers per axis.
    assert!(size_of::<RankSet>() <= 8 + 16 * Axis::ALL.len());
}

#[test]
fn groups_have_short_names() {
    let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 2), (Axis::Tensor, 2)]).unwrap();
    let written = |axes: &[Axis]| mesh.group(0, axes).to_string();
    assert_eq!(written(&[Axis::Tensor]), "0-1");
    assert_eq!(written(&[Axis::Shard]), "0-2/2");
    assert_eq!(written(&[Axis::Replicate, Axis::Tensor]), "0-1,4-5");
    assert_eq!(written(&[Axis::Shard, Axis::Replicate]), "0-6/2");
    assert_eq!(written(&[]), "0");
}

#[test]
fn a_wrong_mesh_is_explained() {
    assert_eq!(Mesh::new(&[(Axis::Shard, 0)]), Err(MeshError::EmptyAxis { axis: Axis::Shard }));
    assert!(matches!(Mesh::new(&[(Axis::Shard, usize::MAX), (Axis::Tensor, 2)]), Err(MeshError::TooLarge { .. })));
    let error = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap().for_world(6).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the mesh replicate 2 × shard 4 has 8 ranks, but 6 were started; change an axis so that the product is 6"
    );
}

#[test]
fn ranks_are_divided_into_replicas_shards_and_groups_that_share_layers() {
    let mesh = Mesh::divide(24, &[(Axis::Replicate, 3), (Axis::Tensor, 2)]).unwrap();
    assert_eq!([Axis::Replicate, Axis::Shard, Axis::Tensor].map(|axis| mesh.size(axis)), [3, 4, 2]);
    let said = |ranks, replicas, tensor| {
        Mesh::divide(ranks, &[(Axis::Replicate, replicas), (Axis::Tensor, tensor)]).unwrap_err().to_string()
    };
    assert_eq!(said(4, 3, 1), "4 ranks cannot be divided into 3 replicas; use a divisor of 4");
    assert_eq!(said(4, 1, 3), "4 ranks cannot be divided into groups of 3; use a divisor of 4");
    assert_eq!(said(8, 3, 2), "4 groups of 2 ranks cannot be divided into 3 replicas; use a divisor of 4");
    assert_eq!(said(4, 0, 1), "4 ranks cannot be divided into 0 replicas; use a divisor of 4");
    assert_eq!(said(4, 1, 0), "4 ranks cannot be divided into groups of 0; use a divisor of 4");
}
