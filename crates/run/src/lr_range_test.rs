//! The plot of a learning rate range test.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

/// The results of an LR range test: the learning rate and the loss of each step.
#[derive(Default)]
pub(crate) struct LrRangeTest {
    points: Vec<(f64, f64)>,
}

/// The decay of the moving average.
const SMOOTHING: f64 = 0.9;

impl LrRangeTest {
    pub(crate) fn add(&mut self, rate: f64, loss: f64) {
        if loss.is_finite() && rate > 0. {
            self.points.push((rate, loss));
        }
    }

    /// The losses as an exponential moving average.
    fn smoothed(&self) -> Vec<(f64, f64)> {
        let mut mean = 0.;
        let smooth = |(index, &(rate, loss)): (usize, &(f64, f64))| {
            mean = SMOOTHING * mean + (1. - SMOOTHING) * loss;
            (rate, mean / (1. - SMOOTHING.powi(index as i32 + 1)))
        };
        self.points.iter().enumerate().map(smooth).collect()
    }

    /// The learning rate with the lowest loss, and a tenth of it as the suggestion.
    pub(crate) fn verdict(&self) -> String {
        match self.lowest() {
            Some((rate, loss)) => format!(
                "the loss was lowest ({loss:.4}, smoothed) at a learning rate of {rate:.2e}; a tenth of that, {:.1e}, is a good peak \
                 learning rate to try",
                rate / 10.
            ),
            None => "there is nothing to plot: no step had a finite loss".to_string(),
        }
    }

    fn lowest(&self) -> Option<(f64, f64)> {
        self.smoothed().into_iter().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Plots the loss over the learning rate.
    pub(crate) fn plot(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let smoothed = self.smoothed();
        let (Some(first), Some(last), Some(lowest)) = (smoothed.first(), smoothed.last(), self.lowest()) else {
            return Err("there is nothing to plot: no step had a finite loss".into());
        };
        // A loss that diverges at the end would flatten the interesting part.
        let highest = first.1 + (first.1 - lowest.1).max(0.1);
        let bottom = lowest.1 - 0.1 * (highest - lowest.1);
        let canvas = SVGBackend::new(path, (900, 500)).into_drawing_area();
        canvas.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&canvas)
            .caption("Learning-rate range test", ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d((first.0..last.0).log_scale(), bottom..highest)?;
        chart
            .configure_mesh()
            .x_desc("learning rate")
            .y_desc("loss")
            .x_label_formatter(&|rate| format!("{rate:.0e}"))
            .y_label_formatter(&|loss| format!("{loss:.2}"))
            .label_style(("sans-serif", 14))
            .max_light_lines(0)
            .draw()?;
        let shown = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|&(_, loss)| (bottom..=highest).contains(&loss)).collect()
        };
        let (grey, blue) = (RGBColor(170, 170, 170), RGBColor(0, 90, 181));
        chart
            .draw_series(LineSeries::new(shown(&self.points), grey.stroke_width(1)))?
            .label("loss of a step")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], grey));
        chart
            .draw_series(LineSeries::new(shown(&smoothed), blue.stroke_width(3)))?
            .label("smoothed")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], blue.stroke_width(3)));
        chart
            .draw_series([Circle::new(lowest, 6, BLACK.filled())])?
            .label(format!("lowest, at {:.1e}", lowest.0))
            .legend(|(x, y)| Circle::new((x + 10, y), 5, BLACK.filled()));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(170, 170, 170))
            .label_font(("sans-serif", 14))
            .draw()?;
        canvas.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_is_found_under_noise() {
        let mut range = LrRangeTest::default();
        for step in 0..200 {
            let rate = 1e-6 * 10f64.powf(f64::from(step) / 40.);
            let noise = f64::from(step * 7919 % 13) / 130.;
            range.add(rate, (rate.log10() + 3.).powi(2) + noise);
        }
        let lowest = range.lowest().expect("there are points").0;
        assert!((1e-3..1e-2).contains(&lowest), "{lowest}");
        assert!(range.verdict().contains("a good peak learning rate"));
    }
}
