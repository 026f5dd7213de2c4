//! Bar charts and line charts of measurements.

use std::error::Error;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn Error>>;

/// Our color is darker than the others, so that it also stands out for color-blind readers.
pub(crate) const OURS: RGBColor = RGBColor(0, 90, 181);
pub(crate) const THEIRS: RGBColor = RGBColor(226, 165, 66);
pub(crate) const BARE: RGBColor = RGBColor(185, 185, 185);

const FONT: &str = "sans-serif";
const PANEL: (u32, u32) = (560, 380);

/// A panel of horizontal bars.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    /// From top to bottom: the name, the value, the range over rounds, and the color.
    pub(crate) bars: Vec<(String, f64, (f64, f64), RGBColor)>,
}

/// A panel of lines over the number of ranks, on a logarithmic axis.
pub(crate) struct Lines {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) lines: Vec<Line>,
}

/// A line of a chart.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(usize, f64)>,
    pub(crate) colour: RGBColor,
    pub(crate) dashed: bool,
}

/// Draws panels of bars, two in a row.
pub(crate) fn bars(path: &Path, panels: &[Bars]) -> Result<()> {
    picture(path, panels.len(), |area, index| draw_bars(area, &panels[index]))
}

/// Draws panels of lines, two in a row.
pub(crate) fn lines(path: &Path, panels: &[Lines]) -> Result<()> {
    picture(path, panels.len(), |area, index| draw_lines(area, &panels[index]))
}

fn picture(path: &Path, panels: usize, draw: impl Fn(&Area<'_>, usize) -> Drawn) -> Result<()> {
    let rows = panels.div_ceil(2);
    let drawn = || -> Drawn {
        let canvas = SVGBackend::new(path, (2 * PANEL.0, rows as u32 * PANEL.1)).into_drawing_area();
        canvas.fill(&WHITE)?;
        for (index, area) in canvas.split_evenly((rows, 2)).iter().enumerate().take(panels) {
            draw(area, index)?;
        }
        Ok(canvas.present()?)
    };
    drawn().map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw_bars(area: &Area<'_>, panel: &Bars) -> Drawn {
    let greatest = panel.bars.iter().map(|(_, value, (_, high), _)| value.max(*high)).fold(0., f64::max);
    let count = panel.bars.len();
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 17))
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(150)
        .build_cartesian_2d(0. ..greatest * 1.15, 0. ..count as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc(panel.unit)
        .x_labels(6)
        .label_style((FONT, 13))
        .max_light_lines(0)
        .draw()?;
    for (place, (name, value, (low, high), colour)) in panel.bars.iter().enumerate() {
        let middle = (count - place) as f64 - 0.5;
        chart.draw_series([Rectangle::new([(0., middle - 0.36), (*value, middle + 0.36)], colour.filled())])?;
        if high > low {
            chart.draw_series([PathElement::new([(*low, middle), (*high, middle)], BLACK.stroke_width(1))])?;
        }
        let number = if greatest < 100. { format!("{value:.2}") } else { format!("{value:.0}") };
        let end = chart.backend_coord(&(value.max(*high), middle));
        area.draw(&Text::new(
            number,
            (end.0 - area.get_base_pixel().0 + 6, end.1 - area.get_base_pixel().1 - 6),
            (FONT, 12),
        ))?;
        let start = chart.backend_coord(&(0., middle));
        let right = plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Right,
            plotters::style::text_anchor::VPos::Center,
        );
        let place = (start.0 - area.get_base_pixel().0 - 6, start.1 - area.get_base_pixel().1);
        area.draw(&Text::new(name.clone(), place, TextStyle::from((FONT, 13)).pos(right)))?;
    }
    Ok(())
}

fn draw_lines(area: &Area<'_>, panel: &Lines) -> Drawn {
    let points = || panel.lines.iter().flat_map(|line| line.points.iter());
    let greatest = points().map(|point| point.1).fold(0., f64::max);
    let doublings = |ranks: usize| (ranks as f64).log2();
    let last = points().map(|point| doublings(point.0)).fold(0., f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 17))
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(60)
        // Leaves room for the legend.
        .build_cartesian_2d(-0.1..last + 0.1, 0. ..greatest * 1.4)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc("ranks")
        .y_desc(panel.unit)
        .x_labels(2 * last as usize + 1)
        .x_label_formatter(&|x| {
            if (x - x.round()).abs() < 1e-6 { format!("{}", 2f64.powf(x.round())) } else { String::new() }
        })
        .label_style((FONT, 13))
        .max_light_lines(0)
        .draw()?;
    for Line { name, points, colour, dashed } in &panel.lines {
        let (colour, dashed) = (*colour, *dashed);
        let points: Vec<(f64, f64)> = points.iter().map(|&(ranks, value)| (doublings(ranks), value)).collect();
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
        let drawn = match dashed {
            true => chart.draw_series(DashedLineSeries::new(points, 5, 4, colour.stroke_width(2)))?,
            false => chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?,
        };
        drawn.label(name).legend(move |(x, y)| {
            let end = if dashed { x + 8 } else { x + 20 };
            PathElement::new([(x, y), (end, y)], colour.stroke_width(2))
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .label_font((FONT, 13))
        .draw()?;
    Ok(())
}
