//! The pieces of rows in which a layer multiplies and communicates (async tensor parallelism).
//!
//! They depend on the shape of a batch alone, and not on whether anything overlaps, so that it changes no bit of the results.

use std::ops::Range;

use shardwise_plan::Partition;

/// The number of pieces of a product that is summed over ranks. With two, half of the sum is hidden behind half of the product; more
/// would hide more of it, in more and smaller messages and products.
const PIECES: usize = 2;

/// The least number of rows that are worth a product of their own. With fewer, reading the weight takes longer than multiplying.
const PIECE_ROWS_MIN: usize = 64;

/// Whether a rank multiplies its own rows, of `rows` in total on `ranks` ranks, before those of the others.
pub(crate) fn multiplies_own_rows_first(rows: usize, ranks: usize) -> bool {
    rows / ranks >= PIECE_ROWS_MIN
}

/// The rows of each piece, of `rows` that are divided into `parts`: the same share of each part. So each piece is divided like the
/// whole, and a part consists of its share of the first piece, then that of the second.
pub(crate) fn row_pieces(rows: usize, parts: usize) -> Vec<Vec<Range<usize>>> {
    let pieces = if rows / (parts * PIECES) >= PIECE_ROWS_MIN { PIECES } else { 1 };
    let share = |piece: usize, part: usize| {
        let part = Partition::new(rows, parts).range(part);
        let share = Partition::new(part.len(), pieces).range(piece);
        part.start + share.start..part.start + share.end
    };
    (0..pieces).map(|piece| (0..parts).map(|part| share(piece, part)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_divided_like_the_whole() {
        for parts in 1..9 {
            for rows in (0..3 * parts).map(|more| parts * PIECES * PIECE_ROWS_MIN + more) {
                let pieces = row_pieces(rows, parts);
                assert_eq!(pieces.len(), PIECES);
                for piece in &pieces {
                    let total = piece.iter().map(Range::len).sum();
                    let divided = Partition::new(total, parts);
                    let lengths: Vec<usize> = (0..parts).map(|part| divided.part_len(part)).collect();
                    assert_eq!(piece.iter().map(Range::len).collect::<Vec<_>>(), lengths, "{rows} rows, {parts} parts");
                }
                let by_part = (0..parts).flat_map(|part| pieces.iter().flat_map(move |piece| piece[part].clone()));
                assert!(by_part.eq(0..rows), "{rows} rows, {parts} parts: some are missing or out of order");
            }
        }
    }

    #[test]
    fn few_rows_are_one_piece() {
        assert_eq!(row_pieces(255, 2), [vec![0..128, 128..255]]);
        assert_eq!(row_pieces(256, 2).len(), 2);
        assert!(!multiplies_own_rows_first(127, 2) && multiplies_own_rows_first(128, 2));
    }
}
