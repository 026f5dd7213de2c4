//! Formats and escapes text for the page. Names, recipes and errors may contain anything.

use std::fmt::{Display, Write};

/// Escapes text for HTML content and attributes.
pub(crate) fn escape(text: impl Display) -> String {
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
            // Characters that are invalid in XML, or that change the direction of the text after them.
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => safe.push('\u{fffd}'),
            _ if char.is_control() => safe.push('\u{fffd}'),
            _ => safe.push(char),
        }
    }
    safe
}

/// Truncates a text to `chars_max` characters, and marks that with an ellipsis.
pub(crate) fn truncate(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_string(),
    }
}

/// Appends to the page.
pub(crate) fn add(page: &mut String, piece: std::fmt::Arguments) {
    page.write_fmt(piece).expect("writing to a string does not fail");
}

/// Formats a time in UTC: `2026-11-15 21:53:07`.
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
    fn markup_is_escaped() {
        assert_eq!(
            escape("<a b='c' d=\"e\">&\u{0}\u{202e}\n"),
            "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;\u{fffd}\u{fffd}\n"
        );
        assert_eq!((truncate("äöü", 2), truncate("äöü", 3)), ("äö…".to_string(), "äöü".to_string()));
        assert_eq!(date(1_800_000_000.), "2027-01-15 08:00:00");
        assert_eq!(date(f64::MAX), "an unknown time");
    }
}
