//! The progress line that a terminal shows during a run: step, loss, throughput, memory and remaining time.
//!
//! It is a function of the journal and of the terminal's width. On a narrow terminal, the least important fields are left out.

use std::collections::VecDeque;

use shardwise_journal::format::{
    format_memory_of_limit, format_short_count, format_short_duration, format_short_number,
};
use shardwise_journal::{Entry, EntryKind, Start, Step};

/// The number of steps over which the pace is measured.
const PACE_LINES: usize = 50;

/// The minimum and the maximum width of the bar.
const BAR_MIN: usize = 8;
const BAR_MAX: usize = 40;

/// Colours of Okabe and Ito's palette, which is safe for colour-blind readers, as escape sequences.
const BLUE: &str = "\x1b[38;2;86;180;233m";
const GREY: &str = "\x1b[38;2;120;120;120m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// The state of the progress line.
#[derive(Default)]
pub(crate) struct ProgressLine {
    start: Option<Start>,
    step: Option<Step>,
    /// The times and numbers of the last steps of this attempt.
    pace: VecDeque<(f64, u64)>,
    restarts: u64,
    /// What the run is doing while it completes no steps.
    state: String,
}

impl ProgressLine {
    /// Adds a journal entry.
    pub(crate) fn add(&mut self, entry: &Entry) {
        match &entry.kind {
            EntryKind::Start(start) => {
                self.start = Some(Start { recipe: String::new(), ..(**start).clone() });
                self.pace = VecDeque::from([(entry.time_s, start.first_step.saturating_sub(1))]);
            }
            EntryKind::Step(step) => {
                self.state.clear();
                self.pace.push_back((entry.time_s, step.step));
                if self.pace.len() > PACE_LINES {
                    self.pace.pop_front();
                }
                self.step = Some(step.clone());
            }
            EntryKind::Launched(launch) => {
                self.restarts = launch.attempt.saturating_sub(1);
                self.state = match launch.ranks {
                    1 => "starting 1 rank".to_string(),
                    ranks => format!("starting {ranks} ranks"),
                };
            }
            EntryKind::Failed { .. } => self.state = "failed".to_string(),
            EntryKind::Ended { code, .. } => {
                self.state = match code {
                    0 => "finished".to_string(),
                    75 => "saved, can be resumed".to_string(),
                    130 => "interrupted".to_string(),
                    code => format!("failed (exit code {code})"),
                };
                self.pace.clear();
            }
            _ => (),
        }
    }

    /// Returns whether an attempt has started, and its steps are shown here.
    pub(crate) fn has_started(&self) -> bool {
        self.start.is_some()
    }

    /// The remaining time, at the pace of the last steps, including evaluations and saves between them.
    fn remaining_s(&self) -> Option<f64> {
        let (&(first_s, first), &(last_s, last)) = (self.pace.front()?, self.pace.back()?);
        let steps = self.start.as_ref()?.steps.checked_sub(last)?;
        let pace = (last_s - first_s) / last.checked_sub(first).filter(|&steps| steps > 0)? as f64;
        (pace.is_finite() && pace >= 0.).then_some(pace * steps as f64)
    }

    /// Formats the line with at most `width` columns.
    pub(crate) fn format(&self, width: usize, is_coloured: bool) -> String {
        let mut fields = self.fields();
        let taken = |fields: &[Field]| fields.iter().map(|field| field.text.chars().count() + 2).sum::<usize>();
        while fields.len() > 1 && taken(&fields) + BAR_MIN > width {
            let least = fields.iter().map(|field| field.priority).min().unwrap_or(0);
            fields.retain(|field| field.priority > least);
        }
        let room = width.saturating_sub(taken(&fields)).min(BAR_MAX);
        let (paint, reset) = if is_coloured { (BOLD, PLAIN) } else { ("", "") };
        let mut texts: Vec<String> = fields
            .iter()
            .map(|field| match field.name {
                "loss" => format!("{paint}{}{reset}", field.text),
                _ => field.text.clone(),
            })
            .collect();
        match (self.fraction(), room >= BAR_MIN) {
            (Some(fraction), true) => texts.insert(1.min(texts.len()), bar(fraction, room, is_coloured)),
            _ if taken(&fields) > width + 2 => return fields[0].text.chars().take(width).collect(),
            _ => (),
        }
        texts.join("  ")
    }

    fn fraction(&self) -> Option<f64> {
        let (start, step) = (self.start.as_ref()?, self.step.as_ref()?);
        Some((step.step as f64 / start.steps.max(1) as f64).clamp(0., 1.))
    }

    /// The fields of the line, in order.
    fn fields(&self) -> Vec<Field> {
        let mut fields = Vec::new();
        let mut add = |name, priority, text: String| fields.push(Field { name, priority, text });
        if let (Some(start), Some(step)) = (&self.start, &self.step) {
            let digits = start.steps.to_string().len();
            add("step", 9, format!("step {:>digits$}/{}", step.step, start.steps));
            add("loss", 8, format!("loss {}", format_short_number(step.loss)));
            if step.tokens_per_s > 0. {
                add("throughput", 5, format!("{} tokens/s", format_short_count(step.tokens_per_s)));
            }
            if let Some(mfu) = step.known_mfu() {
                add("mfu", 3, format!("{:.0}% MFU", 100. * mfu));
            }
            if step.memory_bytes > 0 {
                let limit = start.memory_limit_bytes;
                add("memory", 4, format_memory_of_limit(step.memory_bytes, limit));
            }
        }
        if self.restarts > 0 {
            add("restarts", 2, format!("restarts {}", self.restarts));
        }
        match (self.state.is_empty(), self.remaining_s()) {
            (false, _) => add("state", 7, self.state.clone()),
            (true, Some(remaining_s)) => add("remaining", 6, format!("{} left", format_short_duration(remaining_s))),
            (true, None) => (),
        }
        fields
    }
}

struct Field {
    name: &'static str,
    /// Fields with a low priority are left out first.
    priority: u32,
    text: String,
}

/// `█████▌░░░`, to an eighth of a column.
fn bar(fraction: f64, width: usize, is_coloured: bool) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = ((fraction * 8. * width as f64) as usize).min(8 * width);
    let mut full = "█".repeat(eighths / 8);
    full += PARTS[eighths % 8];
    let rest = "░".repeat(width - full.chars().count());
    match is_coloured {
        true => format!("{BLUE}{full}{GREY}{rest}{PLAIN}"),
        false => full + &rest,
    }
}

#[cfg(test)]
mod tests {
    use shardwise_journal::Launch;

    use super::*;

    fn progress() -> ProgressLine {
        let mut progress = ProgressLine::default();
        let mut add = |time_s, kind| progress.add(&Entry { time_s, kind });
        add(0., EntryKind::Launched(Launch { attempt: 2, ranks: 4, ..Launch::default() }));
        let limit = Some(3 << 30);
        add(
            1.,
            EntryKind::Start(Box::new(Start {
                steps: 2000,
                first_step: 401,
                memory_limit_bytes: limit,
                ..Start::default()
            })),
        );
        for step in 401..=412 {
            let step = Step {
                step,
                loss: 3.2141,
                tokens_per_s: 12_345.,
                mfu: 0.312,
                memory_bytes: 1_288_490_188,
                ..Step::default()
            };
            add(1. + (step.step - 400) as f64 * 0.5, EntryKind::Step(step));
        }
        progress
    }

    #[test]
    fn a_narrow_terminal_leaves_out_the_least_important_fields() {
        let progress = progress();
        assert_eq!(
            progress.format(120, false),
            "step  412/2000  █████▎░░░░░░░░░░░░░░░░░░░░  loss 3.214  12.3k tokens/s  31% MFU  1.2 of 3.0 GiB  restarts 1  13 min left"
        );
        let narrow = progress.format(60, false);
        assert!(narrow.ends_with("░  loss 3.214  13 min left") && narrow.chars().count() == 60, "{narrow}");
        let narrower = progress.format(40, false);
        assert!(narrower.starts_with("step  412/2000  █") && narrower.ends_with("░  loss 3.214"), "{narrower}");
        assert_eq!(progress.format(14, false), "step  412/2000");
        assert_eq!(progress.format(6, false), "step  ");
        assert!(progress.format(60, true).contains("\x1b[38;2;86;180;233m███"));
    }

    #[test]
    fn an_mfu_above_one_is_not_shown() {
        let mut progress = progress();
        let step = Step { step: 413, loss: 3.2, tokens_per_s: 12_345., mfu: 2.52, ..Step::default() };
        progress.add(&Entry { time_s: 8., kind: EntryKind::Step(step) });
        let line = progress.format(120, false);
        assert!(line.contains("12.3k tokens/s") && !line.contains("MFU"), "{line}");
    }

    #[test]
    fn no_width_and_no_number_breaks_the_line() {
        let mut progress = progress();
        for loss in [f64::NAN, f64::INFINITY, -1e300, 1e-300, 0.] {
            let step = Step { step: u64::MAX, loss, tokens_per_s: 1e300, memory_bytes: u64::MAX, ..Step::default() };
            progress.add(&Entry { time_s: f64::MAX, kind: EntryKind::Step(step) });
            for width in 0..200 {
                let line = progress.format(width, false);
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
        assert_eq!(ProgressLine::default().format(80, false), "");
    }
}
