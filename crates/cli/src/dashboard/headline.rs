//! The head of the dashboard as text: the run's name, its progress and its facts.

use shardwise_journal::format::{
    format_memory_of_limit, format_short_count, format_short_duration, format_short_number,
};

use super::run_view::{RunView, Status, now_s};

/// The run's name.
pub(crate) fn name(run: &RunView) -> String {
    match run.start.name.is_empty() {
        true => "a run".to_string(),
        false => run.start.name.clone(),
    }
}

/// The progress of the run: step, loss and time.
pub(crate) fn progress(run: &RunView) -> Vec<String> {
    let Some(last) = &run.last_step else { return vec!["no step completed yet".to_string()] };
    let percent = 100. * last.step as f64 / run.start.steps.max(1) as f64;
    let mut parts = vec![format!("step {}/{} ({percent:.0}%)", last.step, run.start.steps)];
    parts.push(format!("loss {}", format_short_number(last.loss)));
    if let Some(evaluation) = &run.last_evaluation {
        parts.push(format!("eval loss {}", format_short_number(evaluation.loss)));
    }
    let is_running = run.status(now_s()) == Status::Running;
    match run.remaining_s.filter(|remaining_s| *remaining_s > 0. && is_running) {
        Some(remaining_s) => parts.push(format!("{} left", format_short_duration(remaining_s))),
        None => parts.push(format!("took {}", format_short_duration(run.last_s - run.started_s))),
    }
    parts
}

/// The throughput, memory and configuration of the run.
pub(crate) fn facts(run: &RunView) -> Vec<String> {
    let (start, mut parts) = (&run.start, Vec::new());
    if let Some(last) = &run.last_step {
        if let Some((_, tokens_per_s)) = run.throughput.last() {
            parts.push(format!("{} tokens/s", format_short_count(*tokens_per_s)));
        }
        if let Some(mfu) = last.known_mfu() {
            parts.push(format!("{:.0}% MFU", 100. * mfu));
        }
        if last.memory_bytes > 0 {
            parts.push(format_memory_of_limit(last.memory_bytes, start.memory_limit_bytes));
        }
    }
    if start.ranks > 0 {
        let ranks = if start.ranks == 1 { "1 rank".to_string() } else { format!("{} ranks", start.ranks) };
        parts.push(format!("{ranks}, ZeRO stage {}, {}", start.zero_stage, start.param_dtype));
        parts.push(format!("{} parameters", format_short_count(start.parameters as f64)));
    }
    if run.timeline.lost_s() > 0. {
        parts.push(format!("{} lost to restarts", format_short_duration(run.timeline.lost_s())));
    }
    parts
}
