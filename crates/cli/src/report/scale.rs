//! Maps numbers to pixels, chooses ticks, and reduces curves to what a picture can show.

use shardwise_journal::format::{format_count, format_digits};

/// Maps a range of numbers to a range of pixels, linearly or logarithmically.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) is_log: bool,
    /// The pixels of the low and of the high end.
    pub(crate) from: f64,
    pub(crate) to: f64,
}

impl Scale {
    /// Returns the pixel of a number.
    pub(crate) fn pixel(&self, number: f64) -> f64 {
        let fraction = match self.is_log {
            true => (number.max(f64::MIN_POSITIVE).ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            false => (number - self.low) / (self.high - self.low),
        };
        // The frame clips points that are far outside. The bound keeps their coordinates short.
        self.from + fraction.clamp(-1., 2.) * (self.to - self.from)
    }

    pub(crate) fn contains(&self, number: f64) -> bool {
        (self.low..=self.high).contains(&number)
    }

    /// Returns about `count` round numbers in the range.
    pub(crate) fn ticks(&self, count: usize) -> Vec<f64> {
        match self.is_log {
            true => self.log_ticks(count),
            false => linear_ticks(self.low, self.high, count),
        }
    }

    /// Returns the labels of ticks.
    pub(crate) fn labels(&self, ticks: &[f64]) -> Vec<String> {
        let short = |tick: &f64| match *tick {
            t if (1e3..1e6).contains(&t) => format_count(t.round() as u64),
            t if (1e-3..1e3).contains(&t) => {
                format_digits(t, 12).trim_end_matches('0').trim_end_matches('.').to_string()
            }
            t => format!("{t:e}"),
        };
        match self.is_log {
            true => ticks.iter().map(short).collect(),
            false => even_labels(ticks),
        }
    }

    fn log_ticks(&self, count: usize) -> Vec<f64> {
        for steps in [&[1., 2., 3., 5.][..], &[1., 2., 5.], &[1., 3.], &[1.]] {
            let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
            let all = (first..=last).flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
            let ticks: Vec<f64> = all.filter(|tick| self.contains(*tick)).collect();
            if ticks.len() <= count + 1 && ticks.len() > 1 {
                return ticks;
            }
        }
        // The range has more powers of ten than ticks, or lies within one of them.
        let (low, high) = (self.low.log10().ceil() as i32, self.high.log10().floor() as i32);
        match high - low {
            0 | 1 => linear_ticks(self.low, self.high, count),
            powers => {
                let every = (powers as usize).div_ceil(count.max(1)).max(1);
                (low..=high).step_by(every).map(|power| 10_f64.powi(power)).collect()
            }
        }
    }
}

fn linear_ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let rough = (high - low) / count.max(1) as f64;
    if !(rough.is_finite() && rough > 0.) {
        return vec![low];
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1., 2., 2.5, 5., 10.].map(|times| times * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10. * power);
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    (0..=(last - first).clamp(0., 50.) as u64).map(|tick| (first + tick as f64) * step).collect()
}

/// Labels evenly spaced ticks, all with the fewest decimal places that represent them exactly.
fn even_labels(ticks: &[f64]) -> Vec<String> {
    let largest = ticks.iter().fold(0_f64, |most, tick| most.max(tick.abs()));
    let exact = |text: &str, tick: f64| text.parse::<f64>().is_ok_and(|read| (read - tick).abs() <= largest * 1e-6);
    for places in 0..6 {
        let labels: Vec<String> = ticks
            .iter()
            .map(|tick| match largest {
                _ if *tick == 0. => "0".to_string(),
                l if (1e-2..1e9).contains(&l) => format!("{tick:.places$}"),
                _ => format!("{tick:.places$e}"),
            })
            .collect();
        if ticks.iter().zip(&labels).all(|(tick, text)| exact(text, *tick)) {
            let are_counts = largest >= 1000. && places == 0 && largest < 1e9 && ticks.iter().all(|tick| *tick >= 0.);
            return if are_counts {
                ticks.iter().map(|tick| format_count(tick.round() as u64)).collect()
            } else {
                labels
            };
        }
    }
    ticks.iter().map(|tick| format_digits(*tick, 4)).collect()
}

/// Reduces a curve to what a picture with this many columns can show: the minimum and the maximum of each column, in order. Values
/// that are not finite split the curve.
pub(crate) fn thin(
    points: impl ExactSizeIterator<Item = (f64, f64)>,
    (low, high): (f64, f64),
    columns: usize,
) -> Vec<Vec<(f64, f64)>> {
    let is_many = points.len() > columns * 2;
    let (mut pieces, mut column) = (vec![Vec::new()], None::<Column>);
    for (x, y) in points {
        if !y.is_finite() {
            finish(column.take(), &mut pieces);
            if pieces.last().is_some_and(|piece| !piece.is_empty()) {
                pieces.push(Vec::new());
            }
            continue;
        }
        let index = ((x - low) / (high - low).max(f64::MIN_POSITIVE) * columns as f64) as i64;
        match &mut column {
            Some(open) if is_many && open.index == index => open.add((x, y)),
            _ => finish(column.replace(Column { index, least: (x, y), most: (x, y) }), &mut pieces),
        }
    }
    finish(column, &mut pieces);
    // With more pieces than columns, gaps are not visible.
    pieces.retain(|piece| !piece.is_empty());
    if pieces.len() > columns {
        return vec![pieces.concat()];
    }
    pieces
}

struct Column {
    index: i64,
    least: (f64, f64),
    most: (f64, f64),
}

impl Column {
    fn add(&mut self, point: (f64, f64)) {
        if point.1 < self.least.1 {
            self.least = point;
        }
        if point.1 > self.most.1 {
            self.most = point;
        }
    }
}

fn finish(column: Option<Column>, pieces: &mut [Vec<(f64, f64)>]) {
    let (Some(Column { least, most, .. }), Some(piece)) = (column, pieces.last_mut()) else { return };
    if least == most {
        piece.push(least);
    } else if least.0 <= most.0 {
        piece.extend([least, most]);
    } else {
        piece.extend([most, least]);
    }
}

/// Replaces each number by the mean of its neighbours, `half` on each side and fewer near the ends. Values that are not finite are left
/// out.
pub(crate) fn smooth(numbers: &[f64], half: usize) -> Vec<f64> {
    let mut sums = Vec::with_capacity(numbers.len() + 1);
    let (mut sum, mut finite) = (0., 0_u32);
    sums.push((sum, finite));
    for number in numbers {
        if number.is_finite() {
            (sum, finite) = (sum + number, finite + 1);
        }
        sums.push((sum, finite));
    }
    let mean = |index: usize| {
        let reach = half.min(index).min(numbers.len() - 1 - index);
        let ((before, few), (after, many)) = (sums[index - reach], sums[index + reach + 1]);
        if many > few { (after - before) / f64::from(many - few) } else { f64::NAN }
    };
    (0..numbers.len()).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(low: f64, high: f64, is_log: bool) -> Scale {
        Scale { low, high, is_log, from: 0., to: 100. }
    }

    #[test]
    fn ticks_are_round_and_within_the_range() {
        let labels = |low, high, is_log, count| {
            let scale = scale(low, high, is_log);
            scale.labels(&scale.ticks(count)).join(" ")
        };
        assert_eq!(labels(2.9, 9.3, false, 5), "4 6 8");
        assert_eq!(labels(0., 0.5, false, 5), "0 0.1 0.2 0.3 0.4 0.5");
        assert_eq!(labels(0., 6e-4, false, 4), "0 2e-4 4e-4 6e-4");
        assert_eq!(labels(0.4, 90., true, 6), "0.5 1 2 5 10 20 50");
        assert_eq!(labels(1e-9, 1e9, true, 5), "1e-9 1e-5 0.1 1,000 1e7");
        assert_eq!(labels(1., 400., false, 4), "100 200 300 400");
        assert_eq!(labels(1., 4000., false, 4), "1,000 2,000 3,000 4,000");
        for (low, high) in [(0., 0.), (1., 1.), (1e-300, 1e300), (-5., 5.), (3.21, 3.22)] {
            assert!(scale(low, high, false).ticks(5).len() <= 51);
        }
    }

    #[test]
    fn a_thinned_curve_keeps_its_peaks_and_gaps() {
        let number = |n: u32| match n {
            500_000 => 1e6,
            700_000..700_100 => f64::NAN,
            n => f64::from(n % 7),
        };
        let points: Vec<(f64, f64)> = (0..1_000_000).map(|n| (f64::from(n), number(n))).collect();
        let pieces = thin(points.into_iter(), (0., 1e6), 500);
        assert!(pieces.len() == 2 && pieces.concat().len() <= 1004, "{}", pieces.concat().len());
        assert!(pieces[0].contains(&(500_000., 1e6)));
        assert_eq!(thin([(1., 2.), (2., 3.)].into_iter(), (1., 2.), 500), [[(1., 2.), (2., 3.)]]);
    }

    #[test]
    fn a_smooth_curve_starts_and_ends_where_the_numbers_do() {
        let mut numbers: Vec<f64> = (0..100).map(f64::from).collect();
        numbers[50] = f64::NAN;
        let smoothed = smooth(&numbers, 2);
        assert_eq!((smoothed[0], smoothed[99], smoothed[50]), (0., 99., 50.));
        assert!(smooth(&[], 2).is_empty());
    }
}
