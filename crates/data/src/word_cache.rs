//! A cache of tokenized words, for tokenizers that split text like those of GPT-2, Llama 3 or Qwen.
//!
//! `tokenizers` tracks the origin of every character through every step, which takes most of its time. A corpus does not need that, and
//! most of its words repeat. So text is split into words here, and `tokenizers` encodes each word once. Only ASCII is split here, because
//! its character classes are unambiguous and normalization leaves it alone. Text with other characters goes to `tokenizers` in one
//! stretch, up to a position where `tokenizers` would split as well.

use std::collections::HashMap;

use aho_corasick::AhoCorasick;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// The size of a generation of the cache, in words.
const WORDS_MAX: usize = 1 << 14;
/// Longer words are not cached, because they rarely repeat.
const WORD_BYTES_MAX: usize = 64;

/// The regular expression with which Llama 3's `tokenizer.json` splits text.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The regular expression of Qwen 2 and later, in which every digit is a word.
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Splits text into words.
#[derive(Clone)]
pub(crate) struct WordSplitter {
    pattern: WordPattern,
    /// Finds added tokens, which can be anywhere in a text. Text that contains one is not split here.
    added_tokens: AhoCorasick,
}

impl WordSplitter {
    /// Returns `None` for a tokenizer that splits text differently.
    pub(crate) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let pattern = WordPattern::from_pre_tokenizer(tokenizer.get_pre_tokenizer()?)?;
        let added: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
        let is_plain = match tokenizer.get_normalizer() {
            None => true,
            // NFC never joins an ASCII character to the one before it. But it can turn other characters into an added token.
            Some(NormalizerWrapper::NFC(_)) => added.iter().all(|token| !token.normalized),
            Some(_) => false,
        };
        let added_tokens = AhoCorasick::new(added.iter().map(|token| &token.content)).ok()?;
        is_plain.then_some(WordSplitter { pattern, added_tokens })
    }

    pub(crate) fn can_split(&self, text: &str) -> bool {
        !self.added_tokens.is_match(text)
    }

    pub(crate) fn pattern(&self) -> WordPattern {
        self.pattern
    }
}

/// The tokens of recent words, for one tokenizer and one thread. It has two generations: when the new one is full, it replaces
/// the old one, whose words are dropped unless they have been used again. So the cache stays small and follows the text.
#[derive(Default)]
pub(crate) struct WordCache {
    new: HashMap<Box<str>, Box<[u32]>>,
    old: HashMap<Box<str>, Box<[u32]>>,
}

impl WordCache {
    /// Appends the tokens of a text, and calls `encode` for words that are not in the cache.
    pub(crate) fn encode<E>(
        &mut self,
        pattern: WordPattern,
        mut text: &str,
        tokens: &mut Vec<u32>,
        mut encode: impl FnMut(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        while !text.is_empty() {
            let (word, rest) = text.split_at(pattern.word_end(text));
            if let Some(known) = self.new.get(word) {
                tokens.extend_from_slice(known);
            } else if let Some((word, known)) = self.old.remove_entry(word) {
                tokens.extend_from_slice(&known);
                self.insert(word, known);
            } else {
                let found = encode(word)?;
                tokens.extend_from_slice(&found);
                if word.len() <= WORD_BYTES_MAX {
                    self.insert(word.into(), found.into());
                }
            }
            text = rest;
        }
        Ok(())
    }

    fn insert(&mut self, word: Box<str>, tokens: Box<[u32]>) {
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
    /// Any other ASCII character.
    Punctuation,
    /// Not ASCII.
    Other,
}

fn class(byte: u8) -> Class {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
        b'0'..=b'9' => Class::Digit,
        b'\t'..=b'\r' | b' ' => Class::Space,
        0x80.. => Class::Other,
        _ => Class::Punctuation,
    }
}

fn class_at(bytes: &[u8], place: usize) -> Option<Class> {
    bytes.get(place).map(|&byte| class(byte))
}

fn run_end(bytes: &[u8], from: usize, of: Class) -> usize {
    from + bytes[from..].iter().take_while(|&&byte| class(byte) == of).count()
}

fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n')
}

/// How a tokenizer splits text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WordPattern {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// [`LLAMA_3`] with three digits, [`QWEN`] with one.
    Llama3 {
        /// The most digits in a word.
        digits_max: usize,
    },
}

impl WordPattern {
    fn from_pre_tokenizer(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        let steps: &[PreTokenizerWrapper] = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
            step => std::slice::from_ref(step),
        };
        match steps {
            [PreTokenizerWrapper::ByteLevel(bytes)] => {
                (bytes.use_regex && !bytes.add_prefix_space).then_some(WordPattern::Gpt2)
            }
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] => {
                let bytes_only = !bytes.use_regex && !bytes.add_prefix_space;
                let words_only = !split.invert && split.behavior == SplitDelimiterBehavior::Isolated;
                match &split.pattern {
                    SplitPattern::Regex(regex) if bytes_only && words_only => WordPattern::from_regex(regex),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn from_regex(regex: &str) -> Option<Self> {
        match regex {
            LLAMA_3 => Some(WordPattern::Llama3 { digits_max: 3 }),
            QWEN => Some(WordPattern::Llama3 { digits_max: 1 }),
            _ => None,
        }
    }

    /// Where the first word of a text ends, or the first stretch that is not split here.
    fn word_end(self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let end = match self {
            WordPattern::Gpt2 => gpt2_word_end(bytes),
            WordPattern::Llama3 { digits_max } => llama3_word_end(bytes, digits_max),
        };
        match end {
            // A non-ASCII character right after the word may belong to it, or change its last character.
            Some(end) if class_at(bytes, end) != Some(Class::Other) => end,
            _ => self.stretch_end(text),
        }
    }

    /// Where a stretch with non-ASCII characters ends: before a space that follows a character which is certainly not a space. For Llama 3,
    /// a line end belongs to the punctuation before it.
    fn stretch_end(self, text: &str) -> usize {
        let mut solid = false;
        let mut other = false;
        for (place, character) in text.char_indices() {
            let is_space = character.is_ascii() && class(character as u8) == Class::Space;
            if solid && other && is_space && (self == WordPattern::Gpt2 || !is_line_end(character as u8)) {
                return place;
            }
            solid = character.is_alphanumeric() || character.is_ascii_punctuation();
            other |= !character.is_ascii();
        }
        text.len()
    }
}

/// Where the first word ends, or `None` if that depends on a non-ASCII character.
fn gpt2_word_end(bytes: &[u8]) -> Option<usize> {
    let contractions: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];
    if let Some(contraction) = contractions.iter().find(|contraction| bytes.starts_with(contraction)) {
        return Some(contraction.len());
    }
    let from = usize::from(bytes[0] == b' ');
    match class_at(bytes, from) {
        None => Some(from),
        Some(of @ (Class::Letter | Class::Digit | Class::Punctuation)) => Some(run_end(bytes, from, of)),
        Some(Class::Other) => None,
        Some(Class::Space) => spaces_end(bytes),
    }
}

/// The same for Llama 3 and Qwen.
fn llama3_word_end(bytes: &[u8], digits_max: usize) -> Option<usize> {
    if let Some(end) = contraction_end(bytes) {
        return Some(end);
    }
    let lines_end = |from: usize| from + bytes[from..].iter().take_while(|&&byte| is_line_end(byte)).count();
    match (class(bytes[0]), class_at(bytes, 1)) {
        (Class::Letter, _) => Some(run_end(bytes, 0, Class::Letter)),
        (Class::Digit, _) => Some(run_end(bytes, 0, Class::Digit).min(digits_max)),
        // A space or punctuation character goes with the letters after it.
        (Class::Space | Class::Punctuation, Some(Class::Letter)) if !is_line_end(bytes[0]) => {
            Some(run_end(bytes, 1, Class::Letter))
        }
        (Class::Punctuation, _) => Some(lines_end(run_end(bytes, 0, Class::Punctuation))),
        (Class::Space, Some(Class::Punctuation)) if bytes[0] == b' ' => {
            Some(lines_end(run_end(bytes, 1, Class::Punctuation)))
        }
        (Class::Space, _) => {
            let spaces = &bytes[..run_end(bytes, 0, Class::Space)];
            match spaces.iter().rposition(|&byte| is_line_end(byte)) {
                // A non-ASCII character after the spaces may be a space too, followed by more line ends.
                Some(_) if class_at(bytes, spaces.len()) == Some(Class::Other) => None,
                Some(last) => Some(last + 1),
                None => spaces_end(bytes),
            }
        }
        (Class::Other, _) => None,
    }
}

/// Where a run of spaces ends. Unless the text ends with it, its last space may belong to the next word.
fn spaces_end(bytes: &[u8]) -> Option<usize> {
    match run_end(bytes, 0, Class::Space) {
        end if end == bytes.len() => Some(end),
        end if class_at(bytes, end) == Some(Class::Other) => None,
        end => Some((end - 1).max(1)),
    }
}

/// Where `'s`, `'LL` and the like end.
fn contraction_end(bytes: &[u8]) -> Option<usize> {
    let lower = |place: usize| bytes.get(place).map(u8::to_ascii_lowercase);
    match (bytes[0], lower(1), lower(2)) {
        (b'\'', Some(b's' | b't' | b'm' | b'd'), _) => Some(2),
        (b'\'', Some(b'r' | b'v'), Some(b'e')) | (b'\'', Some(b'l'), Some(b'l')) => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::collections::BTreeSet;
    use std::convert::Infallible;
    use std::ops::ControlFlow;
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
    use tokenizers::normalizers::NFC;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::Split;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;
    use crate::Tokenizer;

    const TEXT: &str = "a ab abc.\n\n  12 1234 é 日本 's a'll 'S'LL ..\r\n   \t\t(abc\tab <| .\n e\u{301} \u{212a}a ";

    proptest! {
        #[test]
        fn words_are_split_like_the_tokenizer_does(
            text in r"([ \t\n\r]{0,3}|[a-c]{1,4}|[0-9]{1,3}|'s|'ll|'|\.\.|é|日本|\u{a0}|\u{85}|\u{2028}|²|\x00|\x1c|\u{180e}|😀){0,30}",
        ) {
            let trained = ["a ab abc\n\n  12 é 日本 's a'll ..   \t\t".repeat(9)].into_iter().map(Ok);
            let tokenizer = Tokenizer::train_bpe(trained, 290, &mut |_| ControlFlow::Continue(())).unwrap();
            let mut tokens = Vec::new();
            WordCache::default().encode(WordPattern::Gpt2, &text, &mut tokens, |word| tokenizer.encode(word)).unwrap();
            prop_assert_eq!(tokens, tokenizer.encode(&text).unwrap());
        }

        #[test]
        fn words_are_those_of_llama_3_and_qwen(text in NASTY) {
            for expression in [LLAMA_3, QWEN] {
                let (pattern, split) = (WordPattern::from_regex(expression).unwrap(), split(expression));
                let (mut rest, mut words) = (text.as_str(), Vec::new());
                while !rest.is_empty() {
                    let (word, after) = rest.split_at(pattern.word_end(rest));
                    words.extend(split_by(&split, word));
                    rest = after;
                }
                prop_assert_eq!(words, split_by(&split, &text));
            }
        }

        #[test]
        fn tokens_are_those_of_the_tokenizer(text in NASTY) {
            for (name, tokenizer) in &*TOKENIZERS {
                let (mut cache, mut tokens) = (WordCache::default(), Vec::new());
                for _ in 0..2 {
                    tokens.clear();
                    tokenizer.encode_cached(&mut cache, &text, &mut tokens).unwrap();
                    prop_assert_eq!(tokens.clone(), tokenizer.encode(&text).unwrap(), "{}", name);
                }
            }
        }
    }

    /// Runs of spaces and digits, contractions, punctuation before line ends, special tokens, and characters that are spaces, digits or
    /// marks, or that change when normalized.
    const NASTY: &str = r"([ \t\n\r\x0b\x0c]{1,5}|[a-cSLl]{1,4}|[0-9]{1,7}|'[sS]|'(ll|LL|lL)|'[rv]e|'|[.(<=|]{1,3}|\.\n|<\|end\|>|<\|im|é|e|\u{301}|\u{338}|\u{345}|日本|Ⓐ|ſ|\u{212a}|\u{37e}|\u{a0}|\u{85}|\u{2028}|\u{3000}|²|٣|\x00|\x1c|\u{180e}|\u{200b}|😀|가|ᄀ|ᅡ){0,30}";

    /// Tokenizers that split text like those of Llama 3 and Qwen.
    static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
        let like = [("Llama 3", LLAMA_3, None), ("Qwen", QWEN, Some(NFC))];
        like.map(|(name, expression, normalizer)| (name, train_like(expression, normalizer))).into()
    });

    fn split(expression: &str) -> Split {
        Split::new(SplitPattern::Regex(expression.to_string()), SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    fn split_by(split: &Split, text: &str) -> Vec<String> {
        let mut pre_tokenized = PreTokenizedString::from(text);
        split.pre_tokenize(&mut pre_tokenized).unwrap();
        let words = pre_tokenized.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(word, _, _)| word.to_string()).collect()
    }

    fn train_like(expression: &str, normalizer: Option<NFC>) -> Tokenizer {
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        let steps = vec![split(expression).into(), ByteLevel::new(false, true, false).into()];
        inner.with_pre_tokenizer(Some(Sequence::new(steps)));
        inner.with_normalizer(normalizer).unwrap();
        let trainer = BpeTrainerBuilder::new()
            .vocab_size(330)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from("<|end|>", true)])
            .build();
        inner.train(&mut TrainerWrapper::from(trainer), std::iter::repeat_n(TEXT, 9)).unwrap();
        assert!(WordSplitter::new(&inner).is_some(), "it is split here");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, inner.to_string(false).unwrap()).unwrap();
        Tokenizer::open(&path).unwrap()
    }

    #[test]
    fn a_tokenizer_is_asked_for_each_word_once() {
        let text = "The run's 1234 steps, (of 12) took\n\n 5 hours.\n".repeat(50);
        for expression in [LLAMA_3, QWEN] {
            let mut asked = Vec::new();
            let encode = |word: &str| {
                asked.push(word.to_string());
                Ok::<_, Infallible>(vec![1])
            };
            let (pattern, mut tokens) = (WordPattern::from_regex(expression).unwrap(), Vec::new());
            WordCache::default().encode(pattern, &text, &mut tokens, encode).unwrap();
            assert_eq!(asked.iter().collect::<BTreeSet<_>>().len(), asked.len(), "{asked:?}");
            assert_eq!(tokens.len(), split_by(&split(expression), &text).len());
        }
    }

    #[test]
    fn tokenizers_that_split_in_another_way_are_left_alone() {
        let with = |expression: &str, behavior, prefix_space: bool| {
            let split = Split::new(SplitPattern::Regex(expression.to_string()), behavior, false).unwrap();
            let bytes = ByteLevel::new(prefix_space, true, false);
            WordPattern::from_pre_tokenizer(&Sequence::new(vec![split.into(), bytes.into()]).into())
        };
        assert_eq!(with(LLAMA_3, SplitDelimiterBehavior::Isolated, false), Some(WordPattern::Llama3 { digits_max: 3 }));
        assert_eq!(with(QWEN, SplitDelimiterBehavior::Isolated, false), Some(WordPattern::Llama3 { digits_max: 1 }));
        assert_eq!(with(QWEN, SplitDelimiterBehavior::Isolated, true), None);
        assert_eq!(with(QWEN, SplitDelimiterBehavior::Removed, false), None);
        assert_eq!(with(r"\s+", SplitDelimiterBehavior::Isolated, false), None);
        // Added tokens that match normalized text cannot be found in the original text.
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        inner.with_normalizer(Some(NFC)).unwrap();
        assert!(WordSplitter::new(&inner).is_some());
        inner.add_tokens([AddedToken::from("<tool>", false)]).unwrap();
        assert!(WordSplitter::new(&inner).is_none());
    }
}
