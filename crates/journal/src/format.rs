//! Numbers, durations, sizes and lists, formatted for sentences and tables.

/// Formats a count: `1,234,567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun: `1 step`, `1,200 steps`.
pub fn plural(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{} {noun}s", count(number)),
    }
}

/// Formats a large number: `42.1 million`, `7.2 billion`. Numbers below a million are written out.
pub fn large_number(number: f64) -> String {
    match number {
        n if n >= 999.5e9 => format!("{} trillion", digits(n / 1e12, 3)),
        n if n >= 999.5e6 => format!("{} billion", digits(n / 1e9, 3)),
        n if n >= 999.5e3 => format!("{} million", digits(n / 1e6, 3)),
        n => count(n.max(0.).round() as u64),
    }
}

/// Formats a duration: `0.32 s`, `3.1 s`, `5 min 12 s`, `2 h 3 min`, `3 d 4 h`.
pub fn duration(seconds: f64) -> String {
    // Longer than any run, and still within the range of an integer.
    let whole = seconds.clamp(0., 1e15).round() as u64;
    match seconds {
        s if !s.is_finite() => "an unknown time".to_string(),
        s if s < 0.005 => "0 s".to_string(),
        s if s < 0.995 => format!("{s:.2} s"),
        s if s < 59.95 => format!("{s:.1} s"),
        _ if whole < 3600 => pair(whole / 60, "min", whole % 60, "s"),
        _ if whole < 48 * 3600 => pair((whole + 30) / 3600, "h", (whole + 30) % 3600 / 60, "min"),
        _ => pair((whole + 1800) / 86400, "d", (whole + 1800) % 86400 / 3600, "h"),
    }
}

fn pair(large: u64, large_unit: &str, small: u64, small_unit: &str) -> String {
    match small {
        0 => format!("{large} {large_unit}"),
        _ => format!("{large} {large_unit} {small} {small_unit}"),
    }
}

/// Formats an amount of memory, in binary units: `741 MiB`, `3.20 GiB`.
pub fn memory_size(bytes: f64) -> String {
    const GIB: f64 = (1 << 30) as f64;
    match bytes / GIB {
        much if much >= 999.5 => format!("{} TiB", digits(much / 1024., 3)),
        much if much >= 0.9995 => format!("{} GiB", digits(much, 3)),
        little if little >= 0.95 / 1024. => format!("{} MiB", digits(little * 1024., 3)),
        _ => format!("{} KiB", digits(bytes / 1024., 3)),
    }
}

/// Formats an amount of data sent or stored, in decimal units: `38.7 kB`, `168 MB`.
pub fn byte_size(bytes: f64) -> String {
    match bytes {
        b if b >= 999.5e9 => format!("{} TB", digits(b / 1e12, 3)),
        b if b >= 999.5e6 => format!("{} GB", digits(b / 1e9, 3)),
        b if b >= 999.5e3 => format!("{} MB", digits(b / 1e6, 3)),
        b if b >= 999.5 => format!("{} kB", digits(b / 1e3, 3)),
        b => format!("{b:.0} B"),
    }
}

/// Formats a number with `significant` digits: `9.24`, `0.00301`, `1,830`, and `6.00e-5` if it is very small or large.
pub fn digits(number: f64, significant: usize) -> String {
    let size = number.abs();
    if !number.is_finite() {
        return "not finite".to_string();
    }
    if size == 0. {
        return "0".to_string();
    }
    if !(1e-3..1e15).contains(&size) {
        return format!("{number:.*e}", significant.saturating_sub(1));
    }
    // Rounding may carry: with three digits, 9.996 becomes 10.0.
    let rounded: f64 = format!("{size:.*e}", significant.saturating_sub(1)).parse().unwrap_or(size);
    let places = (significant as i32 - 1 - rounded.log10().floor() as i32).max(0) as usize;
    let sign = if number < 0. { "-" } else { "" };
    match size >= 999.5 && places == 0 {
        true => format!("{sign}{}", count(size.round() as u64)),
        false => format!("{sign}{rounded:.places$}"),
    }
}

/// Formats a list: `a`, `a and b`, `a, b and c`. Long lists are cut: `a, b, c, d, e and 4 more`.
pub fn list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 6;
    match names {
        [] => String::new(),
        [only] => only.clone(),
        many if many.len() > SHOWN_MAX => {
            format!("{} and {} more", many[..SHOWN_MAX - 1].join(", "), many.len() + 1 - SHOWN_MAX)
        }
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_people() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0.324, 3.12, 59.99, 312., 7380., 273_600.].map(duration),
            ["0.32 s", "3.1 s", "1 min", "5 min 12 s", "2 h 3 min", "3 d 4 h"]
        );
        assert_eq!([7198.2, 3599.7, f64::NAN].map(duration), ["2 h", "1 h", "an unknown time"]);
        assert_eq!(duration(1e300), "11574074074 d 2 h");
        assert_eq!(
            [9.996, 0.003_014, 1829.7, 6e-5, -2.5, 0.].map(|n| digits(n, 3)),
            ["10.0", "0.00301", "1,830", "6.00e-5", "-2.50", "0"]
        );
        assert_eq!([777e6, 3.2 * 1.073_741_824e9, 3e3].map(memory_size), ["741 MiB", "3.20 GiB", "2.93 KiB"]);
        assert_eq!([12., 38_700., 168e6].map(byte_size), ["12 B", "38.7 kB", "168 MB"]);
        assert_eq!([42.1e6, 7.24e9, 512.].map(large_number), ["42.1 million", "7.24 billion", "512"]);
    }

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..9).map(|n| n.to_string()).collect();
        assert_eq!(
            [0, 1, 2, 3, 9].map(|n| list(&names[..n])),
            ["", "0", "0 and 1", "0, 1 and 2", "0, 1, 2, 3, 4 and 4 more"]
        );
    }
}
