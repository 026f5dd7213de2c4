//! Texts that go into the page. Names, recipes and errors are whatever somebody wrote.

use std::fmt::{Display, Write};

/// A text as it may stand between tags and in attributes.
pub(crate) fn escaped(text: impl Display) -> String {
    let text = text.to_string();
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' | '\t' => safe.push(char),
            // What would be no page any more, or turn the direction of what follows.
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => safe.push('\u{fffd}'),
            _ if char.is_control() => safe.push('\u{fffd}'),
            _ => safe.push(char),
        }
    }
    safe
}

/// The beginning of a text, with an ellipsis where it goes on.
pub(crate) fn shortened(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((place, _)) => format!("{}…", text[..place].trim_end()),
        None => text.to_string(),
    }
}

/// Adds to a page. Writing to memory does not fail.
pub(crate) fn add(page: &mut String, piece: std::fmt::Arguments) {
    page.write_fmt(piece).expect("a string takes what is written");
}

/// `2026-11-15 21:53:07`, in UTC.
pub(crate) fn date(time_s: f64) -> String {
    match chrono::DateTime::from_timestamp(time_s as i64, 0) {
        Some(date) => date.format("%Y-%m-%d %H:%M:%S").to_string(),
        None => "an unknown time".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_escapes() {
        assert_eq!(
            escaped("<a b='c' d=\"e\">&\u{0}\u{202e}\n"),
            "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;\u{fffd}\u{fffd}\n"
        );
        assert_eq!((shortened("äöü", 2), shortened("äöü", 3)), ("äö…".to_string(), "äöü".to_string()));
        assert_eq!(date(1_800_000_000.), "2027-01-15 08:00:00");
        assert_eq!(date(f64::MAX), "an unknown time");
    }
}
