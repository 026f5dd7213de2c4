//! A profile next to its simulation, unit by unit, and where the two diverge.

use shardwise_journal::format::{format_memory_fixed, format_step_time};
use shardwise_run::ProfileReport;

/// With more units than this, only those whose simulation is furthest off are shown.
const UNITS_SHOWN_MAX: usize = 12;

/// A difference below this is not worth a remark.
const DIFFERENCE_MIN: f64 = 0.05;

/// What was measured and simulated for a unit.
struct Row<'a> {
    unit: &'a str,
    measured_s: f64,
    simulated_s: f64,
    measured_bytes: usize,
    simulated_bytes: usize,
}

/// The lines of the table.
pub(crate) fn simulation_table(profiled: &ProfileReport) -> Vec<String> {
    let rows = rows(profiled);
    let name_width = rows.iter().map(|row| row.unit.len()).max().unwrap_or(0).max(10);
    let mut lines =
        vec![format!("  {:name_width$}  measured  simulated    measured   simulated", "ms/step, peak memory")];
    let width = lines[0].find("  measured").unwrap_or(0).saturating_sub(2);
    let mut shown: Vec<&Row<'_>> = rows.iter().collect();
    if shown.len() > UNITS_SHOWN_MAX {
        let is_off = |row: &&Row<'_>| (row.measured_s - row.simulated_s).abs();
        shown.sort_by(|a, b| is_off(b).total_cmp(&is_off(a)));
        shown.truncate(4);
    }
    for row in shown {
        lines.push(format!(
            "  {:width$}  {:8.1}  {:9.1}  {:>10}  {:>10}",
            row.unit,
            1e3 * row.measured_s,
            1e3 * row.simulated_s,
            format_memory_fixed(row.measured_bytes),
            format_memory_fixed(row.simulated_bytes)
        ));
    }
    lines.push(remark(profiled, &rows));
    lines
}

fn rows(profiled: &ProfileReport) -> Vec<Row<'_>> {
    let of_unit = |(index, unit): (usize, &'_ _)| {
        let unit: &shardwise_run::UnitTimes = unit;
        let measured = profiled.profile.units.iter().find(|times| times.unit == unit.name);
        let phases = profiled.memory.iter().filter(|phase| phase.instruction.split(' ').nth(1) == Some(&unit.name));
        let peak = phases.fold((0, 0), |peak: (usize, usize), phase| {
            (peak.0.max(phase.measured_bytes), peak.1.max(phase.simulated_bytes))
        });
        (index, measured.map_or(0., |times| times.total_s()), peak)
    };
    let rows = profiled.costs.units.iter().enumerate().map(of_unit);
    rows.map(|(index, measured_s, (measured_bytes, simulated_bytes))| Row {
        unit: &profiled.costs.units[index].name,
        measured_s,
        simulated_s: profiled.simulated_unit_s.get(index).copied().unwrap_or(0.),
        measured_bytes,
        simulated_bytes,
    })
    .collect()
}

/// Says how far the simulation is off, and where the most.
fn remark(profiled: &ProfileReport, rows: &[Row<'_>]) -> String {
    let off = profiled.simulated_step_s / profiled.least_step_s.max(1e-9) - 1.;
    let step = format!(
        "Simulation: {} per step, {:+.0}% of the shortest measured step",
        format_step_time(profiled.simulated_step_s),
        100. * off
    );
    let difference = |row: &&Row<'_>| row.simulated_s - row.measured_s;
    let furthest = rows.iter().max_by(|a, b| difference(a).abs().total_cmp(&difference(b).abs()));
    match furthest.filter(|row| difference(row).abs() > DIFFERENCE_MIN * profiled.step_s) {
        Some(row) => format!("{step}; it differs the most in {}, by {:+.0} ms", row.unit, 1e3 * difference(&row)),
        None => step,
    }
}
