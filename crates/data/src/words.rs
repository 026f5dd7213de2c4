//! The tokens of words that were seen before, for tokenizers that cut text as GPT-2's does.
//!
//! `tokenizers` keeps track of where every character of a text came from, through every step, which takes most of its time. A
//! corpus does not need it, and most of its words come again and again. So text is cut into words here, and `tokenizers` is
//! asked for each word once. Only what is plain is cut here: ASCII, whose classes everyone agrees on. What has other characters
//! in it goes to `tokenizers` in one stretch, up to a place where it would cut as well.

use std::collections::HashMap;

use tokenizers::pre_tokenizers::PreTokenizerWrapper;

/// What a thread learns before it forgets what has not come again.
const WORDS_MAX: usize = 1 << 14;
/// Longer words do not come again.
const WORD_BYTES_MAX: usize = 64;
/// More names than this are not looked for.
const NAMES_MAX: usize = 32;

/// Which texts can be cut here.
#[derive(Clone)]
pub(crate) struct Words {
    /// Tokens that are recognised wherever they stand. Texts with them are not cut here.
    names: Vec<String>,
}

impl Words {
    /// `None` for a tokenizer that cuts in another way.
    pub(crate) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let Some(PreTokenizerWrapper::ByteLevel(cut)) = tokenizer.get_pre_tokenizer() else { return None };
        let names: Vec<String> =
            tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        let plain = cut.use_regex && !cut.add_prefix_space && tokenizer.get_normalizer().is_none();
        (plain && names.len() <= NAMES_MAX).then_some(Words { names })
    }

    pub(crate) fn can_cut(&self, text: &str) -> bool {
        !self.names.iter().any(|name| text.contains(name.as_str()))
    }
}

/// What a thread remembers of one tokenizer: the words since it last forgot some, and those from before, which are forgotten
/// next unless they come again. So it stays small however many words there are, and knows those of the text that it is at.
#[derive(Default)]
pub(crate) struct Memory {
    new: HashMap<Box<str>, Box<[u32]>>,
    old: HashMap<Box<str>, Box<[u32]>>,
}

impl Memory {
    /// Adds the tokens of a text; `encode` is asked for those of what is new.
    pub(crate) fn encode<E>(
        &mut self,
        mut text: &str,
        tokens: &mut Vec<u32>,
        mut encode: impl FnMut(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        while !text.is_empty() {
            let (word, rest) = text.split_at(word_end(text));
            if let Some(known) = self.new.get(word) {
                tokens.extend_from_slice(known);
            } else if let Some((word, known)) = self.old.remove_entry(word) {
                tokens.extend_from_slice(&known);
                self.learn(word, known);
            } else {
                let found = encode(word)?;
                tokens.extend_from_slice(&found);
                if word.len() <= WORD_BYTES_MAX {
                    self.learn(word.into(), found.into());
                }
            }
            text = rest;
        }
        Ok(())
    }

    fn learn(&mut self, word: Box<str>, tokens: Box<[u32]>) {
        if self.new.len() == WORDS_MAX {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(word, tokens);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Space,
    Sign,
    /// Not ASCII.
    Other,
}

fn class(byte: u8) -> Class {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
        b'0'..=b'9' => Class::Digit,
        b'\t'..=b'\r' | b' ' => Class::Space,
        0x80.. => Class::Other,
        _ => Class::Sign,
    }
}

/// Where the first word of a text ends, as in GPT-2's expression:
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn word_end(text: &str) -> usize {
    let bytes = text.as_bytes();
    let at = |place: usize| bytes.get(place).map(|&byte| class(byte));
    let run_end = |from: usize, of: Class| from + bytes[from..].iter().take_while(|&&byte| class(byte) == of).count();
    let shortened = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"].iter().find(|short| text.starts_with(**short));
    if let Some(short) = shortened {
        return short.len();
    }
    let from = usize::from(bytes[0] == b' ');
    let end = match at(from) {
        None => return from,
        Some(of @ (Class::Letter | Class::Digit | Class::Sign)) => run_end(from, of),
        Some(Class::Other) => return stretch_end(text),
        Some(Class::Space) => match run_end(0, Class::Space) {
            end if end == bytes.len() => return end,
            end if at(end) == Some(Class::Other) => return stretch_end(text),
            // The last space is the next word's, unless it is all there is.
            end => return (end - 1).max(1),
        },
    };
    if at(end) == Some(Class::Other) { stretch_end(text) } else { end }
}

/// Where a stretch with other characters ends: before a space that follows something which is certainly none.
fn stretch_end(text: &str) -> usize {
    let mut solid = false;
    let mut other = false;
    for (place, sign) in text.char_indices() {
        if solid && other && sign.is_ascii() && class(sign as u8) == Class::Space {
            return place;
        }
        solid = sign.is_alphanumeric() || sign.is_ascii_punctuation();
        other |= !sign.is_ascii();
    }
    text.len()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::ops::ControlFlow;

    use proptest::prelude::*;

    use super::*;
    use crate::Tokenizer;

    proptest! {
        #[test]
        fn words_are_those_that_the_tokenizer_cuts(
            text in r"([ \t\n\r]{0,3}|[a-c]{1,4}|[0-9]{1,3}|'s|'ll|'|\.\.|é|日本|\u{a0}|\u{85}|\u{2028}|²|\x00|\x1c|\u{180e}|😀){0,30}",
        ) {
            let trained = ["a ab abc\n\n  12 é 日本 's a'll ..   \t\t".repeat(9)].into_iter().map(Ok);
            let tokenizer = Tokenizer::train_bpe(trained, 290, &mut |_| ControlFlow::Continue(())).unwrap();
            let mut tokens = Vec::new();
            Memory::default().encode(&text, &mut tokens, |word| tokenizer.encode(word)).unwrap();
            prop_assert_eq!(tokens, tokenizer.encode(&text).unwrap());
        }
    }
}
