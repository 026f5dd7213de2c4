//! Spikes of the loss or the gradient norm.

use std::fmt;

/// What to do with a step whose loss or gradient norm spikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSpike {
    /// Update the parameters as usual, and report the spike.
    Report,
    /// Fail before the update, leaving the parameters unchanged.
    Stop,
}

/// A spike of the loss or the gradient norm, with hints at its cause.
#[derive(Clone, Debug, PartialEq)]
pub struct Spike {
    /// The loss, the gradient norm, or both.
    pub metrics: Vec<SpikedMetric>,
    /// The unit whose share of the gradients grew the most, if any grew.
    pub unit: Option<GradientShare>,
    /// The samples of the step, if known.
    pub samples: Option<String>,
}

/// A metric that spikes.
#[derive(Clone, Debug, PartialEq)]
pub struct SpikedMetric {
    /// The metric's name.
    pub what: &'static str,
    /// Its value in this step.
    pub value: f64,
    /// Its minimum and maximum over the last steps.
    pub range: [f64; 2],
    /// Its median over the last steps.
    pub median: f64,
    /// The number of steps compared with.
    pub steps: usize,
}

/// A unit's share of the squared gradient norm.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientShare {
    /// The unit's name.
    pub unit: String,
    /// Its share in this step.
    pub now: f64,
    /// The median of its share over the last steps.
    pub usual: f64,
}

impl fmt::Display for SpikedMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpikedMetric { what, value, range: [least, most], median, steps } = self;
        write!(
            f,
            "the {what} is {value:.4}; over the last {steps} steps it was {least:.4} to {most:.4} (median {median:.4})"
        )
    }
}

impl fmt::Display for Spike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, metric) in self.metrics.iter().enumerate() {
            write!(f, "{}{metric}", if index == 0 { "" } else { "; " })?;
        }
        match &self.unit {
            Some(GradientShare { unit, now, usual }) => {
                let [now, usual] = [now, usual].map(|share| 100. * share);
                write!(f, "; unit {unit} has {now:.0}% of the squared gradient norm, usually {usual:.0}%")?;
            }
            None => write!(f, "; no unit's share of the gradients has grown")?,
        }
        self.samples.as_ref().map_or(Ok(()), |samples| write!(f, "; the step read {samples}"))
    }
}
