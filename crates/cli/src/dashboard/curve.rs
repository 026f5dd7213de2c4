//! Draws curves over steps, reduced to what the columns of the terminal can show. Values that are not finite are left out.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType};
use shardwise_journal::format::{format_short_count, format_short_number};

use super::colors::{GREY, ORANGE};

/// The number of points per terminal column: a braille character is two dots wide.
const POINTS_PER_COLUMN: usize = 2;

/// Points as (step, value).
type Points = Vec<(f64, f64)>;

/// A curve to draw.
pub(crate) struct Curve<'a> {
    pub(crate) points: &'a [(f64, f64)],
    /// Single points, drawn as marks.
    pub(crate) marks: &'a [(f64, f64)],
    pub(crate) is_log: bool,
    /// Whether the vertical axis starts at zero.
    pub(crate) from_zero: bool,
    pub(crate) style: Style,
}

/// Draws a curve into a block.
pub(crate) fn draw(frame: &mut Frame, area: Rect, block: Block<'_>, curve: &Curve<'_>) {
    let inner = block.inner(area);
    let scaled = |points: &[(f64, f64)]| -> Points {
        let scale = |value: f64| if curve.is_log { value.log10() } else { value };
        let points = points.iter().map(|&(step, value)| (step, scale(value)));
        points.filter(|(step, value)| step.is_finite() && value.is_finite()).collect()
    };
    let (points, marks) = (scaled(curve.points), scaled(curve.marks));
    let Some((steps, values)) = bounds(points.iter().chain(&marks), curve.from_zero && !curve.is_log) else {
        let text = if curve.points.is_empty() { "no step completed yet" } else { "no finite value to draw" };
        return frame.render_widget(ratatui::widgets::Paragraph::new(text.dim()).block(block), area);
    };
    let (mean, spread) = thin(&points, usize::from(inner.width) * POINTS_PER_COLUMN);
    let dataset =
        |data, marker, kind, style| Dataset::default().data(data).marker(marker).graph_type(kind).style(style);
    let grey = Style::new().fg(GREY);
    let datasets = vec![
        dataset(&spread, Marker::Braille, GraphType::Scatter, grey),
        dataset(&mean, Marker::Braille, GraphType::Line, curve.style),
        dataset(&marks, Marker::Dot, GraphType::Scatter, Style::new().fg(ORANGE).bold()),
    ];
    let unscaled = |value: f64| if curve.is_log { 10f64.powf(value) } else { value };
    let label = |value: f64| match curve.from_zero {
        true => format_short_count(unscaled(value)),
        false => format_short_number(unscaled(value)),
    };
    let middle = (values[0] + values[1]) / 2.;
    // Give all labels the same width, so that they align with the axis.
    let labels: Vec<String> = [values[0], middle, values[1]].map(label).to_vec();
    let width = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let labels: Vec<Span<'_>> = labels.into_iter().map(|label| Span::raw(format!("{label:>width$}"))).collect();
    let numbers = [steps[0], (steps[0] + steps[1]) / 2., steps[1]].map(|step| Line::from(format!("{step:.0}")));
    let x_axis = Axis::default().bounds(steps).labels(numbers).style(grey);
    let y_axis = Axis::default().bounds(values).labels(labels).style(grey);
    let chart = Chart::new(datasets).block(block).x_axis(x_axis).y_axis(y_axis).legend_position(None);
    frame.render_widget(chart, area);
}

/// The ranges of steps and values, neither of which is empty; `None` if there is nothing to draw.
fn bounds<'a>(points: impl Iterator<Item = &'a (f64, f64)>, from_zero: bool) -> Option<([f64; 2], [f64; 2])> {
    let none = [f64::INFINITY, f64::NEG_INFINITY];
    let wider = |[least, most]: [f64; 2], value: f64| [least.min(value), most.max(value)];
    let (steps, values) =
        points.fold((none, none), |(steps, values), &(step, value)| (wider(steps, step), wider(values, value)));
    if steps[0] > steps[1] {
        return None;
    }
    let values = if from_zero { wider(values, 0.) } else { values };
    let widen = |[least, most]: [f64; 2]| {
        // A flat line gets room above and below, in proportion to its value.
        let room = if most > least { 0. } else { (least.abs() / 10.).max(0.5) };
        [least - room, most + room]
    };
    let (steps, values) = (widen(steps), widen(values));
    let is_drawable = |[least, most]: [f64; 2]| (most - least).is_finite() && most > least;
    (is_drawable(steps) && is_drawable(values)).then_some((steps, values))
}

/// Reduces points to the mean of each of at most `count_max` pieces, and to the minimum and maximum of each piece.
fn thin(points: &[(f64, f64)], count_max: usize) -> (Points, Points) {
    if points.len() <= count_max.max(2) {
        return (points.to_vec(), Vec::new());
    }
    let (mut mean, mut spread) = (Vec::new(), Vec::new());
    for piece in points.chunks(points.len().div_ceil(count_max.max(2))) {
        let count = piece.len() as f64;
        let (steps, values) = piece
            .iter()
            .fold((0., 0.), |(steps, values), (step, value)| (steps + step / count, values + value / count));
        mean.push((steps, values));
        spread.extend(piece.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)));
        spread.extend(piece.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)));
    }
    (mean, spread)
}
