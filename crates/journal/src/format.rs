//! Formats counts, durations, sizes and lists for people.
//!
//! Most functions are for sentences, and give three significant digits. The `format_short_…` functions are for lines and panes of a
//! terminal, where room is scarce.

use std::fmt::Display;
use std::time::Duration;

/// Formats a count: `1,234,567`.
pub fn format_count(number: u64) -> String {
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
pub fn format_count_of(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{} {noun}s", format_count(number)),
    }
}

/// Formats a count in few columns: `812`, `12.3k`, `4.56M`.
pub fn format_short_count(number: f64) -> String {
    match number.abs() {
        least if least < 999.5 => format!("{number:.0}"),
        least if least < 99_950. => format!("{:.1}k", number / 1e3),
        least if least < 999_500. => format!("{:.0}k", number / 1e3),
        least if least < 9_995_000. => format!("{:.2}M", number / 1e6),
        least if least < 99_950_000. => format!("{:.1}M", number / 1e6),
        least if least < 1e12 => format!("{:.0}M", number / 1e6),
        _ => format!("{number:.1e}"),
    }
}

/// Formats a large number: `42.1 million`, `7.2 billion`. Numbers below a million are written out.
pub fn format_large_number(number: f64) -> String {
    match number {
        n if n >= 999.5e9 => format!("{} trillion", format_digits(n / 1e12, 3)),
        n if n >= 999.5e6 => format!("{} billion", format_digits(n / 1e9, 3)),
        n if n >= 999.5e3 => format!("{} million", format_digits(n / 1e6, 3)),
        n => format_count(n.max(0.).round() as u64),
    }
}

/// Formats a number with `significant` digits: `9.24`, `0.00301`, `1,830`, and `6.00e-5` if it is very small or large.
pub fn format_digits(number: f64, significant: usize) -> String {
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
        true => format!("{sign}{}", format_count(size.round() as u64)),
        false => format!("{sign}{rounded:.places$}"),
    }
}

/// Formats any number in few columns: `3.214`, `812.5`, `6.00e-5`.
pub fn format_short_number(number: f64) -> String {
    match number.abs() {
        size if !size.is_finite() => number.to_string(),
        0. => "0".to_string(),
        size if (1e-3..1e5).contains(&size) => format!("{number:.*}", if size < 100. { 3 } else { 1 }),
        _ => format!("{number:.2e}"),
    }
}

/// Formats a duration: `0.32 s`, `3.1 s`, `5 min 12 s`, `2 h 3 min`, `3 d 4 h`.
pub fn format_duration(seconds: f64) -> String {
    // Longer than any run, and still within the range of an integer.
    let whole = seconds.clamp(0., 1e15).round() as u64;
    match seconds {
        s if !s.is_finite() => "an unknown time".to_string(),
        s if s < 0.005 => "0 s".to_string(),
        s if s < 0.995 => format!("{s:.2} s"),
        s if s < 59.95 => format!("{s:.1} s"),
        _ if whole < 3600 => join_units(whole / 60, "min", whole % 60, "s"),
        _ if whole < 48 * 3600 => join_units((whole + 30) / 3600, "h", (whole + 30) % 3600 / 60, "min"),
        _ => join_units((whole + 1800) / 86400, "d", (whole + 1800) % 86400 / 3600, "h"),
    }
}

/// Formats a duration in few columns: `12 s`, `12 min`, `3 h 4 min`, `5 d 2 h`.
pub fn format_short_duration(seconds: f64) -> String {
    if !(0. ..1e10).contains(&seconds) {
        return "?".to_string();
    }
    let (whole, minutes) = (seconds.round() as u64, (seconds / 60.).round() as u64);
    match minutes {
        0..2 => format!("{whole} s"),
        2..60 => format!("{minutes} min"),
        60..1440 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} d {} h", minutes / 1440, minutes / 60 % 24),
    }
}

/// Formats a duration in few columns, like [`format_short_duration`], but precisely if it is short: `120 ms`, `1.2 s`.
pub fn format_short_millis(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..10_000 => format!("{:.1} s", ms as f64 / 1e3),
        _ => format_short_duration(ms as f64 / 1e3),
    }
}

/// Formats the time that a part of a step takes: `0.4 ms`, `120 ms`, `1.23 s`, `12.3 s`.
pub fn format_step_time(seconds: f64) -> String {
    match seconds {
        much if much >= 10. => format!("{much:.1} s"),
        some if some >= 1. => format!("{some:.2} s"),
        little if little >= 0.1 => format!("{:.0} ms", 1e3 * little),
        less => format!("{:.1} ms", 1e3 * less),
    }
}

/// Formats the time that has passed so far: `2.5 s`, `31 s`, `2 min 5 s`, `2 h 3 min`. It is truncated, not rounded, so that the text
/// never claims more time than has passed.
pub fn format_elapsed(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => strip_zero(&format!("{}.{}", seconds, time.subsec_millis() / 100)) + " s",
        10..120 => format!("{seconds} s"),
        120..7200 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Formats the time that has passed so far, like [`format_elapsed`], but in milliseconds if it is less than a second: `120 ms`.
pub fn format_elapsed_millis(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        _ => format_elapsed(time),
    }
}

/// Formats the time since the start of a run: `1:02:03`.
pub fn format_clock(seconds: f64) -> String {
    let seconds = if (0. ..1e9).contains(&seconds) { seconds as u64 } else { 0 };
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Formats an amount of memory, in binary units: `741 MiB`, `3.20 GiB`.
pub fn format_memory(bytes: f64) -> String {
    const GIB: f64 = (1 << 30) as f64;
    match bytes / GIB {
        much if much >= 999.5 => format!("{} TiB", format_digits(much / 1024., 3)),
        much if much >= 0.9995 => format!("{} GiB", format_digits(much, 3)),
        little if little >= 0.95 / 1024. => format!("{} MiB", format_digits(little * 1024., 3)),
        _ => format!("{} KiB", format_digits(bytes / 1024., 3)),
    }
}

/// Formats an amount of memory with a fixed number of decimals, for columns: `4 MiB`, `741 MiB`, `13.25 GiB`.
pub fn format_memory_fixed(bytes: usize) -> String {
    match bytes as f64 / f64::from(1 << 30) {
        much if much >= 1. => format!("{much:.2} GiB"),
        little => format!("{:.0} MiB", little * 1024.),
    }
}

/// Formats an amount of memory and its limit, if there is one, in few columns: `800 MiB`, `1.2 of 3.0 GiB`.
pub fn format_memory_of_limit(bytes: u64, limit: Option<u64>) -> String {
    let largest = limit.unwrap_or(bytes).max(bytes);
    let (unit, name) = match largest {
        0..0x10_0000 => (f64::from(1 << 10), "KiB"),
        0x10_0000..0x4000_0000 => (f64::from(1 << 20), "MiB"),
        _ => (f64::from(1 << 30), "GiB"),
    };
    let number = |bytes: u64| match bytes as f64 / unit {
        number if name != "GiB" || number >= 100. => format!("{number:.0}"),
        number => format!("{number:.1}"),
    };
    match limit {
        Some(limit) => format!("{} of {} {name}", number(bytes), number(limit)),
        None => format!("{} {name}", number(bytes)),
    }
}

/// Formats an amount of data sent or stored, in decimal units: `38.7 kB`, `168 MB`.
pub fn format_bytes(bytes: f64) -> String {
    match bytes {
        b if b >= 999.5e9 => format!("{} TB", format_digits(b / 1e12, 3)),
        b if b >= 999.5e6 => format!("{} GB", format_digits(b / 1e9, 3)),
        b if b >= 999.5e3 => format!("{} MB", format_digits(b / 1e6, 3)),
        b if b >= 999.5 => format!("{} kB", format_digits(b / 1e3, 3)),
        b => format!("{b:.0} B"),
    }
}

/// Formats an amount of data, in decimal units with at most one decimal: `3 kB`, `38.7 kB`, `168.2 MB`.
pub fn format_short_bytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    format!("{} {name}", strip_zero(&format!("{:.1}", bytes as f64 / unit)))
}

/// Formats the speed of a link: `38.7 MB/s`, `1.25 GB/s`.
pub fn format_bytes_per_s(bytes_per_s: f64) -> String {
    match bytes_per_s {
        much if much >= 1e9 => format!("{:.2} GB/s", much / 1e9),
        little => format!("{:.1} MB/s", little / 1e6),
    }
}

/// Formats the speed of computation: `38.7 GFLOP/s`, `1.25 TFLOP/s`.
pub fn format_flops_per_s(flops_per_s: f64) -> String {
    match flops_per_s {
        much if much >= 1e15 => format!("{:.2} PFLOP/s", much / 1e15),
        much if much >= 1e12 => format!("{:.2} TFLOP/s", much / 1e12),
        little => format!("{:.1} GFLOP/s", little / 1e9),
    }
}

/// Joins a list: `a`, `a and b`, `a, b and c`.
pub fn join_list<T: Display>(items: &[T]) -> String {
    let texts: Vec<String> = items.iter().map(T::to_string).collect();
    match &texts[..] {
        [] => String::new(),
        [only] => only.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

/// Joins a list, and cuts it to `shown_max` parts if it is longer, the last of which counts the rest: `a, b, c, d, e and 4 more`.
pub fn join_list_up_to<T: Display>(items: &[T], shown_max: usize) -> String {
    if items.len() <= shown_max {
        return join_list(items);
    }
    let shown = shown_max.saturating_sub(1);
    let mut texts: Vec<String> = items[..shown].iter().map(T::to_string).collect();
    texts.push(format!("{} more", items.len() - shown));
    join_list(&texts)
}

fn join_units(large: u64, large_unit: &str, small: u64, small_unit: &str) -> String {
    match small {
        0 => format!("{large} {large_unit}"),
        _ => format!("{large} {large_unit} {small} {small_unit}"),
    }
}

/// Removes the decimal of a whole number: `3.0` becomes `3`.
fn strip_zero(number: &str) -> String {
    number.strip_suffix(".0").unwrap_or(number).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_people() {
        assert_eq!([0, 999, 1000, 1_234_567].map(format_count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1, 1200].map(|n| format_count_of(n, "step")), ["0 steps", "1 step", "1,200 steps"]);
        assert_eq!(
            [0.324, 3.12, 59.99, 312., 7380., 273_600.].map(format_duration),
            ["0.32 s", "3.1 s", "1 min", "5 min 12 s", "2 h 3 min", "3 d 4 h"]
        );
        assert_eq!([7198.2, 3599.7, f64::NAN].map(format_duration), ["2 h", "1 h", "an unknown time"]);
        assert_eq!(format_duration(1e300), "11574074074 d 2 h");
        assert_eq!(
            [9.996, 0.003_014, 1829.7, 6e-5, -2.5, 0.].map(|n| format_digits(n, 3)),
            ["10.0", "0.00301", "1,830", "6.00e-5", "-2.50", "0"]
        );
        assert_eq!([777e6, 3.2 * 1.073_741_824e9, 3e3].map(format_memory), ["741 MiB", "3.20 GiB", "2.93 KiB"]);
        assert_eq!([12., 38_700., 168e6].map(format_bytes), ["12 B", "38.7 kB", "168 MB"]);
        assert_eq!([42.1e6, 7.24e9, 512.].map(format_large_number), ["42.1 million", "7.24 billion", "512"]);
    }

    #[test]
    fn durations_and_sizes_are_short() {
        let times = [(0.4, "0 s"), (119., "2 min"), (7_500., "2 h 5 min"), (1e6, "11 d 13 h"), (f64::NAN, "?")];
        times.into_iter().for_each(|(seconds, text)| assert_eq!(format_short_duration(seconds), text));
        assert_eq!([120, 1_240, 12_000].map(format_short_millis), ["120 ms", "1.2 s", "12 s"]);
        let counts = [(811.2, "811"), (999.7, "1.0k"), (123_456., "123k"), (4_560_000., "4.56M")];
        counts.into_iter().for_each(|(count, text)| assert_eq!(format_short_count(count), text));
        let numbers = [(0., "0"), (3.2141, "3.214"), (812.46, "812.5"), (6e-5, "6.00e-5"), (f64::NAN, "NaN")];
        numbers.into_iter().for_each(|(number, text)| assert_eq!(format_short_number(number), text));
        assert_eq!(format_memory_of_limit(800 << 20, None), "800 MiB");
        assert_eq!(format_memory_of_limit(200 << 20, Some(2 << 30)), "0.2 of 2.0 GiB");
        let sizes =
            [(999, "999 B"), (3_000, "3 kB"), (38_700, "38.7 kB"), (12_582_912, "12.6 MB"), (2_000_000_000, "2 GB")];
        sizes.into_iter().for_each(|(bytes, text)| assert_eq!(format_short_bytes(bytes), text));
        assert_eq!([0., 3723.9, -1., f64::NAN].map(format_clock), ["0:00:00", "1:02:03", "0:00:00", "0:00:00"]);
    }

    #[test]
    fn elapsed_time_is_truncated() {
        let times = [(999, "0.9 s"), (3_000, "3 s"), (9_999, "9.9 s"), (119_999, "119 s"), (125_900, "2 min 5 s")];
        times.into_iter().for_each(|(ms, text)| assert_eq!(format_elapsed(Duration::from_millis(ms)), text));
        assert_eq!(format_elapsed(Duration::from_secs(7_439)), "2 h 3 min");
        assert_eq!(format_elapsed_millis(Duration::from_micros(999_900)), "999 ms");
        assert_eq!(format_elapsed_millis(Duration::from_millis(1_990)), "1.9 s");
    }

    #[test]
    fn columns_have_fixed_decimals() {
        assert_eq!([0, 4 << 20, 741 << 20].map(format_memory_fixed), ["0 MiB", "4 MiB", "741 MiB"]);
        assert_eq!([1 << 30, 53 << 28].map(format_memory_fixed), ["1.00 GiB", "13.25 GiB"]);
        let times = [(0.0004, "0.4 ms"), (0.12, "120 ms"), (1.234, "1.23 s"), (12.34, "12.3 s")];
        times.into_iter().for_each(|(seconds, text)| assert_eq!(format_step_time(seconds), text));
        assert_eq!([38.7e6, 1.25e9].map(format_bytes_per_s), ["38.7 MB/s", "1.25 GB/s"]);
        assert_eq!([38.7e9, 1.25e12, 2.5e15].map(format_flops_per_s), ["38.7 GFLOP/s", "1.25 TFLOP/s", "2.50 PFLOP/s"]);
    }

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..9).map(|n| n.to_string()).collect();
        assert_eq!(
            [0, 1, 2, 3, 9].map(|n| join_list_up_to(&names[..n], 6)),
            ["", "0", "0 and 1", "0, 1 and 2", "0, 1, 2, 3, 4 and 4 more"]
        );
        assert_eq!(join_list_up_to(&["a", "b", "c", "d", "e"], 4), "a, b, c and 2 more");
        assert_eq!(join_list(&[1, 2, 3, 4, 5, 6, 7]), "1, 2, 3, 4, 5, 6 and 7");
    }
}
