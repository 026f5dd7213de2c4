//! Formats a profile for people: tables that fit the terminal, and the changes most likely to help.

use shardwise_journal::format::{format_bytes_per_s, format_flops_per_s, format_memory_fixed, format_step_time};
use shardwise_journal::{GroupCommunication, UnitTime};
use shardwise_run::{DeviceCounts, OffloadedBytes, ProfileReport, Recommendation};

use crate::simulation_table::simulation_table;

/// The width if standard output is not a terminal, and the minimum width.
const WIDTH: usize = 100;
const WIDTH_MIN: usize = 40;

/// With more units than this, the blocks are merged into one line.
const UNITS_SHOWN_MAX: usize = 12;

/// Returns the text to print.
pub(crate) fn table(profiled: &ProfileReport, width: Option<usize>) -> String {
    let width = width.unwrap_or(WIDTH).max(WIDTH_MIN);
    let mut lines = heading(profiled);
    lines.push(String::new());
    lines.extend(by_kind(profiled, width));
    lines.push(String::new());
    lines.extend(by_unit(profiled, width));
    lines.push(String::new());
    lines.extend(machine(profiled));
    lines.push(String::new());
    lines.extend(simulation_table(profiled));
    lines.push(String::new());
    lines.extend(changes(&profiled.changes, profiled.least_step_s));
    lines.iter().flat_map(|line| wrap(line, width)).collect::<Vec<_>>().join("\n") + "\n"
}

fn heading(profiled: &ProfileReport) -> Vec<String> {
    let ProfileReport { ranks, hosts, stage, precision, parameters, tokens, step_s, .. } = profiled;
    let hosts = if *hosts == 1 { String::new() } else { format!(" on {hosts} hosts") };
    vec![
        format!(
            "{:.1} million parameters in {precision}, stage {stage}, {ranks} ranks{hosts}",
            *parameters as f64 / 1e6
        ),
        format!(
            "A step of {tokens} tokens takes {}: {:.0} tokens/s ({} traced)",
            format_step_time(*step_s),
            *tokens as f64 / step_s,
            if profiled.profile.steps == 1 {
                "1 step".to_string()
            } else {
                format!("{} steps", profiled.profile.steps)
            }
        ),
    ]
}

/// The time of the training thread by kind, longest first.
fn by_kind(profiled: &ProfileReport, width: usize) -> Vec<String> {
    let whole = profiled.profile.step_s;
    let mut kinds = profiled.profile.kinds.clone();
    kinds.sort_by(|a, b| b.mean_s.total_cmp(&a.mean_s));
    let bar_width = width.saturating_sub(44).min(40);
    let mut lines = vec!["  time of a step       mean   share".to_string()];
    for kind in kinds.iter().filter(|kind| kind.mean_s >= 0.001 * whole) {
        let fraction = kind.mean_s / whole.max(1e-12);
        let spread = match kind.most_s > 1.25 * kind.mean_s && kind.most_s > 0.02 * whole && profiled.ranks > 1 {
            true => format!("  {} on rank {}", format_step_time(kind.most_s), kind.most_rank),
            false => String::new(),
        };
        let line = format!(
            "  {:14} {:>10} {:>6.1}%  {}",
            kind.kind,
            format_step_time(kind.mean_s),
            100. * fraction,
            bar(fraction, bar_width)
        );
        let line = line.trim_end();
        let fits = line.chars().count() + spread.chars().count() <= width;
        lines.push(if fits { format!("{line}{spread}") } else { line.to_string() });
    }
    lines
}

fn by_unit(profiled: &ProfileReport, width: usize) -> Vec<String> {
    let units = merge_blocks(&profiled.profile.units);
    type Column = (&'static str, fn(&UnitTime) -> f64);
    let columns: [Column; 9] = [
        ("forward", |unit| unit.forward_s),
        ("recompute", |unit| unit.recompute_s),
        ("backward", |unit| unit.backward_s),
        ("optimizer", |unit| unit.optimizer_s),
        ("offload", |unit| unit.offload_s),
        ("copy", |unit| unit.copy_s),
        ("wait:gather", |unit| unit.wait_gather_s),
        ("wait:reduce", |unit| unit.wait_reduce_s),
        ("total", UnitTime::total_s),
    ];
    let is_used =
        |(name, of): &Column| !["recompute", "offload"].contains(name) || units.iter().any(|unit| of(unit) > 0.);
    let columns: Vec<Column> = columns.into_iter().filter(is_used).collect();
    let name_width = units.iter().map(|unit| unit.unit.chars().count()).max().unwrap_or(0).max(10);
    let needed = 2 + name_width + columns.iter().map(|(name, _)| name.len().max(7) + 2).sum::<usize>();
    // On a narrow terminal, only the most important columns are shown.
    let columns: Vec<Column> = match needed <= width {
        true => columns,
        false => columns.into_iter().filter(|(name, _)| ["forward", "backward", "total"].contains(name)).collect(),
    };
    let cell = |name: &str, text: String| format!("  {text:>width$}", width = name.len().max(7));
    let head: String = columns.iter().map(|(name, _)| cell(name, (*name).to_string())).collect();
    let mut lines = vec![format!("  {:name_width$}{head}", "ms/step")];
    for unit in &units {
        let cells: String = columns.iter().map(|(name, of)| cell(name, format!("{:.1}", 1e3 * of(unit)))).collect();
        lines.push(format!("  {:name_width$}{cells}", unit.unit));
    }
    lines
}

/// Merges the blocks into one line if there are many units.
fn merge_blocks(units: &[UnitTime]) -> Vec<UnitTime> {
    if units.len() <= UNITS_SHOWN_MAX {
        return units.to_vec();
    }
    let Some(((first, rest), last)) = units.split_first().zip(units.last()) else { return Vec::new() };
    let inner = &rest[..rest.len() - 1];
    let slowest = inner.iter().max_by(|a, b| a.total_s().total_cmp(&b.total_s()));
    let sum = |of: fn(&UnitTime) -> f64| inner.iter().map(of).sum::<f64>();
    let all = UnitTime {
        unit: format!("{} blocks", inner.len()),
        forward_s: sum(|unit| unit.forward_s),
        recompute_s: sum(|unit| unit.recompute_s),
        backward_s: sum(|unit| unit.backward_s),
        optimizer_s: sum(|unit| unit.optimizer_s),
        offload_s: sum(|unit| unit.offload_s),
        copy_s: sum(|unit| unit.copy_s),
        wait_gather_s: sum(|unit| unit.wait_gather_s),
        wait_reduce_s: sum(|unit| unit.wait_reduce_s),
    };
    let slowest = slowest.map(|unit| UnitTime { unit: format!("the slowest: {}", unit.unit), ..unit.clone() });
    [Some(first.clone()), Some(all), slowest, Some(last.clone())].into_iter().flatten().collect()
}

fn machine(profiled: &ProfileReport) -> Vec<String> {
    let communication = profiled.profile.communication;
    let mut lines = Vec::new();
    let achieved = profiled.flops / profiled.step_s.max(1e-9);
    let peak = profiled.peak_flops_per_s;
    lines.push(match achieved <= peak {
        true => format!(
            "Compute: {} of the {} that large matrix products reach here: {:.1}% MFU",
            format_flops_per_s(achieved),
            format_flops_per_s(peak),
            100. * achieved / peak.max(1.)
        ),
        // An MFU above 100% means that the peak was measured on a busy machine.
        false if peak > 0. => format!(
            "Compute: {}; the machine was too busy to measure what large matrix products reach here",
            format_flops_per_s(achieved)
        ),
        false => {
            format!("Compute: {}; what large matrix products reach here is not known", format_flops_per_s(achieved))
        }
    });
    if let Some(DeviceCounts { operators, host_waits, to_device, to_host, allocations }) = profiled.device {
        lines.push(format!(
            "Device, per step: {operators} operators, {allocations} allocations, {to_device} copies to the device, {to_host} from it; \
             times that the host waited: {host_waits}"
        ));
    }
    if profiled.ranks > 1 {
        lines.push(format!(
            "Communication: {} per step, {:.0}% of it hidden; ranks wait for {}, of which {} for a late rank",
            format_step_time(communication.total_s),
            100. * communication.hidden_share(),
            format_step_time(communication.exposed_s),
            format_step_time(communication.late_s),
        ));
        if profiled.profile.groups.len() > 1 {
            lines.extend(profiled.profile.groups.iter().map(group_line));
        }
        for verb in profiled.profile.verbs.iter().filter(|verb| verb.sent_bytes >= 1.) {
            let calls = format!("{:.0} calls", verb.calls);
            let sent = format!("{:.1} MB", verb.sent_bytes / 1e6);
            lines.push(format!(
                "  {:14} {calls:>10} {sent:>9} at {}",
                verb.verb,
                format_bytes_per_s(verb.bytes_per_s())
            ));
        }
        if profiled.peak_bytes_per_s > 0. {
            let latency = 1e6 * profiled.latency_s;
            let peak = format_bytes_per_s(profiled.peak_bytes_per_s);
            lines
                .push(format!("  a large all-gather reaches {peak} here, and the smallest call takes {latency:.0} µs"));
        }
    }
    if let Some(moved) = profiled.offload {
        let OffloadedBytes { read_bytes, written_bytes, read_bytes_per_s, write_bytes_per_s, .. } = moved;
        let waited_s = profiled.profile.units.iter().map(|unit| unit.offload_s).sum();
        lines.push(format!(
            "Disk: a rank reads {:.1} MB per step at {}, writes {:.1} MB at {}, and waits for {}",
            read_bytes / 1e6,
            format_bytes_per_s(read_bytes_per_s),
            written_bytes / 1e6,
            format_bytes_per_s(write_bytes_per_s),
            format_step_time(waited_s),
        ));
    }
    let limit =
        profiled.memory_limit_bytes.map_or(String::new(), |bytes| format!(" of {}", format_memory_fixed(bytes)));
    lines.push(format!("Memory: at most {}{limit} per rank", format_memory_fixed(profiled.memory_peak_bytes)));
    lines
}

fn group_line(GroupCommunication { axes, communication }: &GroupCommunication) -> String {
    format!(
        "  {axes:24} {:>9} {:.1} MB, {:.0}% hidden",
        format_step_time(communication.total_s),
        communication.sent_bytes as f64 / 1e6,
        100. * communication.hidden_share(),
    )
}

fn changes(changes: &[Recommendation], step_s: f64) -> Vec<String> {
    if changes.is_empty() {
        return vec!["Nothing stands out: none of the changes considered would help by 5%.".to_string()];
    }
    let mut lines = vec![match changes.len() {
        1 => "The change most likely to help:".to_string(),
        2 => "The two changes most likely to help:".to_string(),
        _ => "The three changes most likely to help:".to_string(),
    }];
    for (index, change) in changes.iter().enumerate() {
        lines.push(format!("  {}. {}", index + 1, change.change));
        let how = if change.tried { "tried" } else { "estimated" };
        lines.push(format!(
            "     {:.2} times as fast: {} instead of {} ({how})",
            change.gain,
            format_step_time(change.step_s),
            format_step_time(step_s)
        ));
        lines.push(format!("     {}", change.why));
    }
    lines
}

fn bar(fraction: f64, width: usize) -> String {
    let eighths = (fraction.clamp(0., 1.) * width as f64 * 8.).round() as usize;
    let rest = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'][eighths % 8];
    format!("{}{rest}", "█".repeat(eighths / 8)).trim_end().to_string()
}

/// Wraps a line, and indents the continuation lines like the first.
fn wrap(line: &str, width: usize) -> Vec<String> {
    let indent = line.len() - line.trim_start().len();
    if line.chars().count() <= width {
        return vec![line.to_string()];
    }
    let mut lines = vec![line[..indent].to_string()];
    for word in line.split_whitespace() {
        let last = lines.last_mut().expect("there is a first line");
        let has_words = last.chars().count() > indent;
        if has_words && last.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("{}{word}", " ".repeat(indent)));
        } else {
            *last += &format!("{}{word}", if has_words { " " } else { "" });
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use shardwise_journal::{Communication, KindTime, Profile, VerbRate};
    use shardwise_run::{Link, PhaseMemory, StepCosts, UnitTimes};

    use super::*;

    fn profiled(units: usize) -> ProfileReport {
        let unit = |index: usize| UnitTime { unit: format!("block.{index}"), forward_s: 0.01, ..UnitTime::default() };
        let kind = |kind: &str, mean_s| KindTime { kind: kind.to_string(), mean_s, most_s: 2. * mean_s, most_rank: 1 };
        let link = Link { latency_s: 0., bytes_per_s: 1e9, cpu_s_per_byte: 0. };
        let times = |index: usize| {
            let name = format!("block.{index}");
            UnitTimes { name, forward_s: 0.01, backward_s: 0., update_s: 0., norm_s: 0. }
        };
        ProfileReport {
            ranks: 2,
            hosts: 1,
            stage: 3,
            precision: "bf16".to_string(),
            parameters: 42_000_000,
            tokens: 2048,
            step_s: 0.5,
            least_step_s: 0.5,
            profile: Profile {
                steps: 5,
                ranks: 2,
                step_s: 0.5,
                kinds: vec![kind("forward", 0.1), kind("wait gather", 0.4)],
                units: (0..units).map(unit).collect(),
                verbs: vec![VerbRate { verb: "all-gather".to_string(), calls: 3., sent_bytes: 1e6, moving_s: 0.1 }],
                ..Profile::default()
            },
            flops: 1e10,
            peak_flops_per_s: 1e11,
            peak_bytes_per_s: 1e9,
            latency_s: 1e-5,
            memory_peak_bytes: 1 << 30,
            memory_limit_bytes: None,
            memory_estimate_bytes: 2 << 30,
            memory: vec![PhaseMemory {
                instruction: "forward block.0 micro-batch=0 keep=all".to_string(),
                measured_bytes: 7 << 20,
                simulated_bytes: 8 << 20,
            }],
            device: None,
            offload: None,
            costs: StepCosts {
                micro_batch_tokens: 512,
                tensor: 1,
                expert: 1,
                overhead_s: 0.,
                cores_per_host: 2,
                threads_per_rank: 1,
                ranks_per_host: None,
                within_host: link,
                between_hosts: link,
                disk_bytes_per_s: None,
                units: (0..units).map(times).collect(),
            },
            simulated_step_s: 0.09,
            simulated_unit_s: vec![0.02; units],
            trace: "trace.json".into(),
            changes: vec![Recommendation {
                cause: "link",
                change: "zero.stage = 2".to_string(),
                why: "80% of a step is waiting for parameters, which there is memory to keep".to_string(),
                step_s: 0.25,
                gain: 2.,
                tried: true,
            }],
        }
    }

    #[test]
    fn it_fits_terminals_of_any_width() {
        for (width, units) in [(20, 3), (40, 3), (60, 40), (80, 10), (100, 40), (200, 0)] {
            let text = table(&profiled(units), Some(width));
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(width.max(WIDTH_MIN)), "{width}: {text}");
            assert!(text.contains("2.00 times as fast"), "{text}");
        }
        let many = table(&profiled(40), Some(100));
        assert!(many.contains("38 blocks") && many.contains("380.0"), "{many}");
        let busy = table(&ProfileReport { peak_flops_per_s: 1e9, ..profiled(3) }, None);
        assert!(busy.contains("too busy to measure") && !busy.contains("2000.0%"), "{busy}");
        let group = |axes: &str| GroupCommunication {
            axes: axes.to_string(),
            communication: Communication { total_s: 0.4, hidden_s: 0.3, ..Communication::default() },
        };
        let mut divided = profiled(3);
        divided.profile.groups = vec![group("ring"), group("shard×ring")];
        let divided = table(&divided, Some(80));
        assert!(divided.contains("shard×ring") && divided.contains("75% hidden"), "{divided}");
        let none = table(&ProfileReport { changes: Vec::new(), ..profiled(3) }, None);
        assert!(none.contains("Nothing stands out"), "{none}");
    }
}
