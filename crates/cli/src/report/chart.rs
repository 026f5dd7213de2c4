//! Draws line charts as SVG: axes with round numbers, a smooth line over the measured one, marks for events, and the number of ranks
//! below. Curves have their names at their ends, and differ in dashes and shapes, not only in hue.

use shardwise_journal::format::format_digits;

use super::scale::{Scale, smooth, thin};
use super::text::{add, escape};

/// The number of line styles. Further curves reuse the hues, with different dashes.
pub(crate) const STYLES: usize = 6;

/// The number of columns of the widest picture.
const COLUMNS: usize = 1100;
/// Curves with fewer points are not smoothed.
const SMOOTHED_MIN: usize = 12;
/// The smallest width with room for full names.
const ROOMY_WIDTH: f64 = 600.;
const CHAR_WIDTH: f64 = 6.4;
const LABEL_HEIGHT: f64 = 14.;
const BAND_HEIGHT: f64 = 20.;
/// The maximum number of marks of one kind in a chart.
const MARKS_MAX: usize = 60;

/// A chart, independent of its size.
#[derive(Default)]
pub(crate) struct Chart {
    /// The prefix of the ids of its SVG elements.
    pub(crate) id: String,
    pub(crate) title: String,
    /// A description of what the chart shows, also for screen readers.
    pub(crate) description: String,
    /// The label of the vertical axis.
    pub(crate) unit: String,
    /// The label of the horizontal axis.
    pub(crate) along: String,
    pub(crate) curves: Vec<Curve>,
    pub(crate) is_log: bool,
    pub(crate) from_zero: bool,
    /// Horizontal lines, such as a limit.
    pub(crate) levels: Vec<(f64, String)>,
    /// Vertical lines, such as a restart.
    pub(crate) moments: Vec<(f64, String)>,
    pub(crate) bands: Vec<Band>,
}

/// A curve, as detailed as the widest picture needs.
#[derive(Default)]
pub(crate) struct Curve {
    /// The label at its end.
    pub(crate) label: String,
    pub(crate) style: usize,
    /// Single points with a shape, each with a tooltip.
    pub(crate) marks: Vec<(f64, f64, String)>,
    /// Points where an attempt failed, each with a tooltip.
    pub(crate) failures: Vec<(f64, f64, String)>,
    /// The measured values, in pieces; empty if the line shows them.
    raw: Vec<Piece>,
    /// The main line: the mean around each point, or the points themselves.
    line: Vec<Piece>,
    /// Where values were not finite.
    gaps: Vec<f64>,
    /// The range of the measured values, without the few most extreme ones.
    range: Option<(f64, f64)>,
}

type Piece = Vec<(f64, f64)>;

/// A band with the number of ranks: pieces with their start, end and number.
pub(crate) struct Band {
    pub(crate) label: String,
    pub(crate) pieces: Vec<(f64, f64, usize)>,
}

/// The size of a picture, in pixels at its natural scale.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) width: f64,
    pub(crate) height: f64,
}

struct Frame {
    x: Scale,
    y: Scale,
    size: Size,
    below: f64,
}

impl Chart {
    /// Draws the chart. `suffix` keeps the ids of two sizes of one chart apart.
    pub(crate) fn svg(&self, size: Size, suffix: &str) -> String {
        let id = format!("{}{suffix}", self.id);
        let height = size.height + self.bands.len().saturating_sub(1) as f64 * BAND_HEIGHT;
        let size = Size { height, ..size };
        let mut svg = String::new();
        add(
            &mut svg,
            format_args!(
                "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\"><title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n",
                size.width,
                size.height,
                escape(&self.title),
                escape(&self.description)
            ),
        );
        let frame = self.frame(size);
        let Scale { from: left, to: right, .. } = frame.x;
        let Scale { from: bottom, to: top, .. } = frame.y;
        add(
            &mut svg,
            format_args!(
                "<clipPath id=\"{id}-c\"><rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/></clipPath>\n",
                right - left,
                bottom - top
            ),
        );
        self.axes(&frame, &mut svg);
        self.moments(&frame, &mut svg);
        add(&mut svg, format_args!("<g clip-path=\"url(#{id}-c)\">\n"));
        for curve in &self.curves {
            curve.draw(self.curves.len() > 1, &frame, &mut svg);
        }
        svg.push_str("</g>\n");
        for curve in &self.curves {
            curve.draw_marks(&frame, &mut svg);
            curve.draw_outside(&frame, &mut svg);
        }
        self.end_labels(&frame, &mut svg);
        self.bands(&frame, &mut svg);
        svg.push_str("</svg>\n");
        svg
    }

    fn frame(&self, size: Size) -> Frame {
        let (low, high) = self.range();
        let labels = self.curves.iter().map(|curve| curve.label_for(size).chars().count()).max().unwrap_or(0) as f64;
        let below = size.height - 36. - self.bands.len() as f64 * BAND_HEIGHT;
        let mut y = Scale {
            low,
            high,
            is_log: self.is_log && low > 0.,
            from: below,
            to: if self.moments.is_empty() { 24. } else { 38. },
        };
        let widest = y.labels(&y.ticks(5)).iter().map(|label| label.chars().count()).max().unwrap_or(1) as f64;
        let (first, last) = self.extent();
        let left = 12. + widest * CHAR_WIDTH;
        let right = (size.width - 10. - labels * CHAR_WIDTH - if labels > 0. { 6. } else { 0. }).max(left + 80.);
        if self.from_zero && !y.is_log {
            y.low = y.low.min(0.);
        }
        Frame { x: Scale { low: first, high: last, is_log: false, from: left, to: right }, y, size, below }
    }

    /// The range of the horizontal axis, which includes everything.
    fn extent(&self) -> (f64, f64) {
        let of_curves = self.curves.iter().flat_map(|curve| {
            let ends = curve.line.iter().flat_map(|piece| [piece.first(), piece.last()]).flatten().map(|(x, _)| *x);
            let singles = curve.marks.iter().chain(&curve.failures).map(|(x, ..)| *x);
            ends.chain(singles).chain(curve.gaps.iter().copied())
        });
        let of_bands = self.bands.iter().flat_map(|band| &band.pieces).flat_map(|(from, to, _)| [*from, *to]);
        let (first, last) = ends_of(of_curves.chain(of_bands));
        match (first <= last, first < last) {
            (false, _) => (0., 1.),
            (true, false) => (first - 0.5, first + 0.5),
            (true, true) => (first, last),
        }
    }

    /// The range of the vertical axis: all of the smooth lines, marks and levels, and all but the most extreme measured values.
    fn range(&self) -> (f64, f64) {
        let mut ends: Vec<f64> = self.levels.iter().map(|(y, _)| *y).collect();
        for curve in &self.curves {
            ends.extend(curve.range.into_iter().flat_map(|(low, high)| [low, high]));
            ends.extend(curve.line.iter().flatten().map(|(_, y)| *y));
            ends.extend(curve.marks.iter().chain(&curve.failures).map(|(_, y, _)| *y).filter(|y| y.is_finite()));
        }
        ends.retain(|end| !self.is_log || *end > 0.);
        let (low, high) = ends_of(ends.iter().copied());
        if low > high {
            return (0., 1.);
        }
        if self.is_log {
            return (low / 1.08, high * 1.08);
        }
        let low = if self.from_zero { low.min(0.) } else { low };
        let pad = if high > low { (high - low) * 0.05 } else { (high.abs() * 0.05).max(1e-12) };
        (if low == 0. && self.from_zero { 0. } else { low - pad }, high + pad)
    }

    fn axes(&self, frame: &Frame, svg: &mut String) {
        let Scale { from: left, to: right, .. } = frame.x;
        let ticks = frame.y.ticks(if frame.below < 180. { 4 } else { 6 });
        for (tick, label) in ticks.iter().zip(frame.y.labels(&ticks)) {
            let y = frame.y.pixel(*tick);
            add(
                svg,
                format_args!(
                    "<path class=\"grid\" d=\"M{left:.1} {y:.1}H{right:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" class=\"e\">{label}</text>\n",
                    left - 5.,
                    y + 4.
                ),
            );
        }
        let base = frame.size.height - 36.;
        add(svg, format_args!("<path class=\"axis\" d=\"M{left:.1} {:.1}H{right:.1}\"/>\n", frame.below));
        let count = ((right - left) / 70.).max(2.) as usize;
        let ticks = frame.x.ticks(count);
        for (tick, label) in ticks.iter().zip(frame.x.labels(&ticks)) {
            let x = frame.x.pixel(*tick);
            add(
                svg,
                format_args!(
                    "<path class=\"axis\" d=\"M{x:.1} {base:.1}v4\"/><text x=\"{x:.1}\" y=\"{:.1}\" class=\"m\">{label}</text>\n",
                    base + 17.
                ),
            );
        }
        let (middle, foot) = ((left + right) / 2., frame.size.height - 4.);
        let log = if frame.y.is_log { " (logarithmic)" } else { "" };
        add(
            svg,
            format_args!(
                "<text x=\"{middle:.1}\" y=\"{foot:.1}\" class=\"m q\">{}</text><text x=\"4\" y=\"12\" class=\"q\">{}{log}</text>\n",
                escape(&self.along),
                escape(&self.unit)
            ),
        );
        for (level, label) in &self.levels {
            let y = frame.y.pixel(*level);
            add(
                svg,
                format_args!(
                    "<path class=\"level\" d=\"M{left:.1} {y:.1}H{right:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" class=\"halo\">{}</text>\n",
                    left + 4.,
                    if y < frame.y.to + 16. { y + 14. } else { y - 5. },
                    escape(label)
                ),
            );
        }
    }

    fn moments(&self, frame: &Frame, svg: &mut String) {
        let mut free_from = f64::NEG_INFINITY;
        for (moment, label) in self.moments.iter().take(MARKS_MAX).filter(|(moment, _)| frame.x.contains(*moment)) {
            let x = frame.x.pixel(*moment);
            add(svg, format_args!("<path class=\"moment\" d=\"M{x:.1} 33V{:.1}\"/>", frame.below));
            let width = label.chars().count() as f64 * CHAR_WIDTH + 6.;
            if x - width / 2. > free_from {
                free_from = x + width / 2.;
                add(
                    svg,
                    format_args!(
                        "<rect class=\"flag\" x=\"{:.1}\" y=\"18\" width=\"{width:.1}\" height=\"15\" rx=\"3\"/><text class=\"m\" x=\"{x:.1}\" y=\"29.5\">{}</text>",
                        x - width / 2.,
                        escape(label)
                    ),
                );
            }
            svg.push('\n');
        }
    }

    /// Draws the names of the curves at their ends, moved apart where they would overlap.
    fn end_labels(&self, frame: &Frame, svg: &mut String) {
        let named = self.curves.iter().filter(|curve| !curve.label.is_empty());
        let mut labels: Vec<(f64, &Curve)> = named
            .filter_map(|curve| {
                let (_, y) = curve.line.last()?.last()?;
                Some((frame.y.pixel(*y).clamp(frame.y.to, frame.y.from), curve))
            })
            .collect();
        labels.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut above = f64::NEG_INFINITY;
        for (y, _) in &mut labels {
            *y = y.max(above + LABEL_HEIGHT);
            above = *y;
        }
        for (index, (y, curve)) in labels.iter().enumerate() {
            let y = y.min(frame.y.from - LABEL_HEIGHT * (labels.len() - 1 - index) as f64);
            add(
                svg,
                format_args!(
                    "<text class=\"b f{}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
                    curve.style % STYLES,
                    frame.x.to + 6.,
                    y + 4.,
                    escape(curve.label_for(frame.size))
                ),
            );
        }
    }

    fn bands(&self, frame: &Frame, svg: &mut String) {
        for (index, band) in self.bands.iter().enumerate() {
            let foot = frame.below + (index + 1) as f64 * BAND_HEIGHT;
            let most = band.pieces.iter().map(|(_, _, ranks)| *ranks).max().unwrap_or(1).max(1) as f64;
            add(
                svg,
                format_args!(
                    "<text class=\"e\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    frame.x.from - 5.,
                    foot - 4.,
                    escape(&band.label)
                ),
            );
            for (from, to, ranks) in band.pieces.iter().take(MARKS_MAX) {
                let (left, right) = (frame.x.pixel(*from), frame.x.pixel(*to));
                let height = (*ranks as f64 / most * (BAND_HEIGHT - 4.)).max(3.);
                add(
                    svg,
                    format_args!(
                        "<rect class=\"band\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{ranks} ranks</title></rect>",
                        foot - height,
                        (right - left).max(1.)
                    ),
                );
                let labels = [format!("{ranks} rank{}", if *ranks == 1 { "" } else { "s" }), ranks.to_string()];
                let fits = |label: &&String| label.len() as f64 * CHAR_WIDTH + 4. <= right - left;
                if let Some(label) = labels.iter().find(fits) {
                    let (middle, width) = ((left + right) / 2., label.len() as f64 * CHAR_WIDTH + 4.);
                    add(
                        svg,
                        format_args!(
                            "<rect class=\"pill\" x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"13\" rx=\"2\"/><text class=\"m\" x=\"{middle:.1}\" y=\"{:.1}\">{label}</text>",
                            middle - width / 2.,
                            foot - 14.5,
                            foot - 4.
                        ),
                    );
                }
            }
            svg.push('\n');
        }
    }
}

impl Curve {
    /// Creates a curve of points that are ordered by x. If `parts` is given, the curve is smoothed between these positions but not
    /// across them, because the number of ranks changed there.
    pub(crate) fn new(points: &[(f64, f64)], parts: Option<&[f64]>) -> Self {
        let ends = (points.first().map_or(0., |(x, _)| *x), points.last().map_or(1., |(x, _)| *x));
        let raw = thin(points.iter().copied(), ends, COLUMNS);
        let mut all: Vec<f64> = points.iter().map(|(_, y)| *y).filter(|y| y.is_finite()).collect();
        all.sort_unstable_by(f64::total_cmp);
        let out = all.len() / 300;
        let range = all.get(out).copied().zip(all.len().checked_sub(out + 1).map(|index| all[index]));
        let gaps = points.iter().filter(|(_, y)| !y.is_finite()).map(|(x, _)| *x).take(MARKS_MAX).collect();
        let (raw, line) = match parts.filter(|_| points.len() >= SMOOTHED_MIN) {
            Some(parts) => {
                let means = smooth_in_parts(points, parts);
                (raw, thin(points.iter().map(|(x, _)| *x).zip(means.iter().copied()), ends, COLUMNS))
            }
            None => (Vec::new(), raw),
        };
        Curve { raw, line, gaps, range, ..Curve::default() }
    }

    /// The label for a picture of this size: on a narrow one, only the letter.
    fn label_for(&self, size: Size) -> &str {
        match size.width < ROOMY_WIDTH {
            true => self.label.split(' ').next().unwrap_or_default(),
            false => &self.label,
        }
    }

    /// Removes the marks of values that are not finite, for curves where they only separate pieces.
    pub(crate) fn without_gaps(self) -> Self {
        Curve { gaps: Vec::new(), ..self }
    }

    fn draw(&self, is_one_of_several: bool, frame: &Frame, svg: &mut String) {
        let (hue, dashes) = (self.style % STYLES, (self.style + self.style / STYLES) % STYLES);
        if !is_one_of_several && !self.raw.is_empty() {
            add(svg, format_args!("<path class=\"raw s{hue}\" d=\"{}\"/>\n", path(&self.raw, frame)));
        }
        add(svg, format_args!("<path class=\"line s{hue} d{dashes}\" d=\"{}\"/>\n", path(&self.line, frame)));
        let line = self.line.concat();
        if let [(x, y)] = line[..] {
            shape(self.style, frame.x.pixel(x), frame.y.pixel(y), 4., svg);
        }
        if is_one_of_several && line.len() > 6 {
            // Use different positions for each curve, so that shapes do not cover each other.
            for part in 0..5 {
                let at = (line.len() - 1) * (2 * part + 1) / 10 + line.len() * (self.style % 4) / 40;
                let (x, y) = line[at.min(line.len() - 1)];
                shape(self.style, frame.x.pixel(x), frame.y.pixel(y), 4., svg);
            }
        }
    }

    fn draw_marks(&self, frame: &Frame, svg: &mut String) {
        let every = self.marks.len().div_ceil(MARKS_MAX).max(1);
        let last = self.marks.len().saturating_sub(1);
        for (x, y, text) in
            self.marks.iter().enumerate().filter(|(n, _)| n % every == 0 || *n == last).map(|(_, mark)| mark)
        {
            let (x, y) = (frame.x.pixel(*x), frame.y.pixel(*y));
            add(
                svg,
                format_args!(
                    "<path class=\"mark f{}\" d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\"><title>{}</title></path>\n",
                    self.style % STYLES,
                    y - 5.,
                    escape(text)
                ),
            );
        }
    }

    /// Draws crosses for failures and values that are not finite, and wedges for values outside the range.
    fn draw_outside(&self, frame: &Frame, svg: &mut String) {
        let Scale { from: bottom, to: top, .. } = frame.y;
        for (x, y, text) in self.failures.iter().take(MARKS_MAX) {
            let (x, y) = (frame.x.pixel(*x), frame.y.pixel(*y));
            let drawn = format!("M{:.1} {:.1}l10 10m0 -10l-10 10", x - 5., y - 5.);
            add(svg, format_args!("<path class=\"cross\" d=\"{drawn}\"><title>{}</title></path>\n", escape(text)));
        }
        for x in &self.gaps {
            add(
                svg,
                format_args!(
                    "<path class=\"cross\" d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\"><title>at {}: not finite</title></path>\n",
                    frame.x.pixel(*x) - 4.,
                    bottom - 11.,
                    format_digits(*x, 7)
                ),
            );
        }
        let outside = self.raw.iter().flatten().filter(|(_, y)| !frame.y.contains(*y));
        for (x, y) in outside.take(MARKS_MAX) {
            let at = frame.x.pixel(*x);
            let drawn = match *y > frame.y.high {
                true => format!("M{at:.1} {:.1}l4 7h-8z", top - 3.),
                false => format!("M{at:.1} {:.1}l4 -7h-8z", bottom + 3.),
            };
            let text = format!("at {}: {}", format_digits(*x, 7), format_digits(*y, 4));
            add(svg, format_args!("<path class=\"wedge\" d=\"{drawn}\"><title>{text}</title></path>\n"));
        }
    }
}

fn smooth_in_parts(points: &[(f64, f64)], parts: &[f64]) -> Vec<f64> {
    let half = (points.len() / 60).max(2);
    let mut ends: Vec<usize> = parts.iter().map(|part| points.partition_point(|(x, _)| x < part)).collect();
    ends.push(points.len());
    let (mut means, mut from) = (Vec::with_capacity(points.len()), 0);
    for to in ends {
        if to > from {
            let ys: Vec<f64> = points[from..to].iter().map(|(_, y)| *y).collect();
            means.extend(smooth(&ys, half));
            from = to;
        }
    }
    means
}

/// The minimum and the maximum. If there are no numbers, the maximum is below the minimum.
fn ends_of(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    let finite = numbers.filter(|number| number.is_finite());
    finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), number| (low.min(number), high.max(number)))
}

/// Formats the pieces of a curve as a path, reduced to the detail of the picture.
fn path(pieces: &[Piece], frame: &Frame) -> String {
    let columns = (frame.x.to - frame.x.from).max(10.) as usize;
    let mut path = String::new();
    for piece in pieces {
        let reduced = thin(piece.iter().copied(), (frame.x.low, frame.x.high), columns).concat();
        for (index, (x, y)) in reduced.iter().enumerate() {
            let letter = if index == 0 { 'M' } else { 'L' };
            add(&mut path, format_args!("{letter}{:.1} {:.1}", frame.x.pixel(*x), frame.y.pixel(*y)));
        }
        if reduced.len() == 1 {
            path.push_str("h0.1");
        }
    }
    path
}

/// Draws the shape of a style: a disc, a square, a triangle, a diamond, and two of them hollow.
pub(crate) fn shape(style: usize, x: f64, y: f64, reach: f64, svg: &mut String) {
    let hue = style % STYLES;
    let hollow = if hue >= 4 { " hollow" } else { "" };
    let r = reach;
    let drawn = match hue % 4 {
        0 => format!("M{:.1} {y:.1}a{r} {r} 0 1 0 {} 0a{r} {r} 0 1 0 -{} 0z", x - r, 2. * r, 2. * r),
        1 => format!("M{:.1} {:.1}h{}v{}h-{}z", x - r, y - r, 2. * r, 2. * r, 2. * r),
        2 => format!("M{x:.1} {:.1}l{r} {}h-{}z", y - r, 2. * r, 2. * r),
        _ => format!("M{x:.1} {:.1}l{r} {r}l-{r} {r}l-{r} -{r}z", y - r),
    };
    add(svg, format_args!("<path class=\"shape f{hue} s{hue}{hollow}\" d=\"{drawn}\"/>\n"));
}
