//! Reads the profiles that PipeDream publishes: a graph of layers with times in milliseconds and sizes in bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use shardwise_plan::pipeline_partition::UnitProfile;

/// The names of the published profiles.
pub(crate) const PROFILES: [&str; 5] = ["alexnet", "gnmt", "gnmt_large", "resnet50", "vgg16"];

/// Reads a published profile as a chain of units.
pub(crate) fn read_profile(name: &str) -> Vec<UnitProfile> {
    let path = folder().join(format!("{name}.txt"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    parse_profile(&text)
}

/// Merges neighboring units until there are `count`.
pub(crate) fn condense(units: &[UnitProfile], count: usize) -> Vec<UnitProfile> {
    assert!(count <= units.len(), "{count} of {} units", units.len());
    let merge = |group: &[UnitProfile]| UnitProfile {
        name: group[0].name.clone(),
        forward_s: group.iter().map(|unit| unit.forward_s).sum(),
        backward_s: group.iter().map(|unit| unit.backward_s).sum(),
        output_bytes: group[group.len() - 1].output_bytes,
        parameter_bytes: group.iter().map(|unit| unit.parameter_bytes).sum(),
        kept_bytes: group.iter().map(|unit| unit.kept_bytes).sum(),
    };
    (0..count).map(|group| merge(&units[group * units.len() / count..(group + 1) * units.len() / count])).collect()
}

/// Puts the layers of a profile in topological order. A layer's output is sent across every cut that one of its edges crosses, once.
/// Inputs are left out, as in PipeDream: their times are those of reading data, which every stage does for itself.
pub(crate) fn parse_profile(text: &str) -> Vec<UnitProfile> {
    let mut layers: BTreeMap<usize, UnitProfile> = BTreeMap::new();
    let mut edges: BTreeSet<(usize, usize)> = BTreeSet::new();
    for line in text.lines() {
        if let Some(edge) = line.strip_prefix('\t') {
            let (from, to) = edge.split_once(" -- ").unwrap_or_else(|| panic!("not an edge: {line}"));
            edges.insert((node_number(from), node_number(to)));
        } else {
            let (number, layer) = parse_layer(line).unwrap_or_else(|| panic!("not a layer: {line}"));
            layers.insert(number, layer);
        }
    }
    layers.retain(|_, layer| !layer.name.starts_with("Input"));
    edges.retain(|(from, to)| layers.contains_key(from) && layers.contains_key(to));

    let order = sort_topologically(layers.keys().copied().collect(), &edges);
    let position: BTreeMap<usize, usize> = order.iter().enumerate().map(|(at, &number)| (number, at)).collect();
    let mut crossing_bytes = vec![0; order.len()];
    for (at, number) in order.iter().enumerate() {
        let readers = edges.iter().filter(|(from, _)| from == number).map(|(_, to)| position[to]);
        let last_reader = readers.max().unwrap_or(at);
        crossing_bytes[at..last_reader].iter_mut().for_each(|bytes| *bytes += layers[number].kept_bytes);
    }
    let sent = order.iter().zip(crossing_bytes);
    sent.map(|(number, output_bytes)| UnitProfile { output_bytes, ..layers[number].clone() }).collect()
}

/// Where the profiles are: in `$SHARDWISE_ORACLES/pipedream`, or in `shared/oracles/pipedream` next to the workspace or above it.
fn folder() -> PathBuf {
    let near = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().skip(2).map(|folder| folder.join("shared/oracles"));
    let given = std::env::var_os("SHARDWISE_ORACLES").map(PathBuf::from);
    let mut folders = given.into_iter().chain(near).map(|oracles| oracles.join("pipedream"));
    folders.find(|folder| folder.is_dir()).expect(
        "this test needs PipeDream's profiles: copy profiler/*/profiles/*/graph.txt of github.com/msr-fiddle/pipedream to \
         pipedream/alexnet.txt, gnmt.txt, gnmt_large.txt, resnet50.txt and vgg16.txt in a folder, and set SHARDWISE_ORACLES to it",
    )
}

/// Parses `node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, …, activation_size=[6291456.0; 131072.0], …`.
fn parse_layer(line: &str) -> Option<(usize, UnitProfile)> {
    let (number, rest) = line.split_once(" -- ")?;
    let (name, costs) = rest.rsplit_once(" -- ")?;
    let cost = |key: &str| -> Option<f64> {
        let (_, value) = costs.split(", ").filter_map(|cost| cost.split_once('=')).find(|(name, _)| *name == key)?;
        value.trim_matches(['[', ']']).split("; ").map(|part| part.parse::<f64>().ok()).sum()
    };
    let layer = UnitProfile {
        name: name.to_string(),
        forward_s: cost("forward_compute_time")? / 1e3,
        backward_s: cost("backward_compute_time")? / 1e3,
        output_bytes: 0,
        parameter_bytes: cost("parameter_size")? as usize,
        kept_bytes: cost("activation_size")? as usize,
    };
    Some((node_number(number), layer))
}

fn node_number(name: &str) -> usize {
    let number = name.trim().strip_prefix("node").and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("not a node: {name}"))
}

/// Of the nodes that depend on none of the remaining ones, takes the one with the lowest number.
fn sort_topologically(mut remaining: BTreeSet<usize>, edges: &BTreeSet<(usize, usize)>) -> Vec<usize> {
    let mut order = Vec::new();
    while !remaining.is_empty() {
        let waits = |node: usize| edges.iter().any(|&(from, to)| to == node && remaining.contains(&from));
        let next = remaining.iter().copied().find(|&node| !waits(node)).expect("a profile without cycles");
        remaining.remove(&next);
        order.push(next);
    }
    order
}
