//! Draws the dashboard: all panes on a large screen, one or two on a small one.

use std::cell::Cell;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Paragraph};
use shardwise_watch::Snapshot;

use super::colors::{BLUE, GREEN, GREY, ORANGE, VERMILLION};
use super::curve::{self, Curve};
use super::headline::{facts, name, progress};
use super::run_view::{RunView, Status, now_s};
use super::source::Link;
use super::{events, memory, ranks};

/// The smallest size that shows all panes at once, and the height below which there is room for only one pane.
const LARGE: (u16, u16) = (110, 30);
const SHORT: u16 = 18;

/// The data of one frame.
pub(crate) struct Dashboard<'a> {
    pub(crate) run: &'a RunView,
    pub(crate) snapshot: Option<&'a Snapshot>,
    pub(crate) link: Link,
    pub(crate) ui: &'a UiState,
}

/// A pane of the dashboard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pane {
    #[default]
    Loss,
    Throughput,
    Memory,
    Ranks,
    Events,
}

impl Pane {
    pub(crate) const ALL: [Pane; 5] = [Pane::Loss, Pane::Throughput, Pane::Memory, Pane::Ranks, Pane::Events];

    fn name(self) -> &'static str {
        match self {
            Pane::Loss => "loss",
            Pane::Throughput => "throughput",
            Pane::Memory => "memory",
            Pane::Ranks => "ranks",
            Pane::Events => "events",
        }
    }

    pub(crate) fn next(self) -> Self {
        Pane::ALL[(self as usize + 1) % Pane::ALL.len()]
    }

    pub(crate) fn previous(self) -> Self {
        Pane::ALL[(self as usize + Pane::ALL.len() - 1) % Pane::ALL.len()]
    }
}

/// What the user has selected with keys.
#[derive(Default)]
pub(crate) struct UiState {
    pub(crate) pane: Pane,
    pub(crate) is_log: bool,
    /// How far each pane is scrolled, in lines. Drawing limits it to the number of lines.
    pub(crate) scrolled: [Cell<usize>; 5],
}

impl UiState {
    /// Scrolls the selected pane. Events are scrolled from their end.
    pub(crate) fn scroll(&self, lines: isize) {
        let scrolled = &self.scrolled[self.pane as usize];
        let lines = if self.pane == Pane::Events { -lines } else { lines };
        scrolled.set(scrolled.get().saturating_add_signed(lines));
    }
}

/// Draws the dashboard.
pub(crate) fn draw(frame: &mut Frame, dashboard: &Dashboard<'_>) {
    let area = frame.area();
    let head_lines = if area.height < SHORT { 2 } else { 3 };
    let parts = [Constraint::Length(head_lines), Constraint::Min(0), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(parts).areas(area);
    draw_head(frame, head, dashboard);
    match (area.width >= LARGE.0 && area.height >= LARGE.1, area.height < SHORT) {
        (true, _) => draw_large(frame, body, dashboard),
        (false, false) => draw_small(frame, body, dashboard),
        (false, true) => draw_short(frame, body, dashboard),
    }
    draw_foot(frame, foot, dashboard);
}

fn draw_large(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    // Without the state of the ranks, the events take their place.
    let events_lines = if dashboard.snapshot.is_some() { (area.height / 4).max(6) } else { 0 };
    let [upper, lower] = Layout::vertical([Constraint::Min(0), Constraint::Length(events_lines)]).areas(area);
    let [left, right] = Layout::horizontal([Constraint::Percentage(55), Constraint::Percentage(45)]).areas(upper);
    let [loss, throughput] = Layout::vertical([Constraint::Percentage(64), Constraint::Percentage(36)]).areas(left);
    let memory_rows = memory_height(dashboard, right);
    let [memory, rest] = Layout::vertical([Constraint::Length(memory_rows), Constraint::Min(0)]).areas(right);
    for (pane, area) in [(Pane::Loss, loss), (Pane::Throughput, throughput), (Pane::Memory, memory)] {
        draw_pane(frame, area, pane, dashboard);
    }
    match dashboard.snapshot {
        Some(_) => {
            draw_pane(frame, rest, Pane::Ranks, dashboard);
            draw_pane(frame, lower, Pane::Events, dashboard);
        }
        None => draw_pane(frame, rest, Pane::Events, dashboard),
    }
}

/// The height of the memory pane: its lines, but at most half of the area.
fn memory_height(dashboard: &Dashboard<'_>, area: Rect) -> u16 {
    let lines = memory_lines(dashboard, usize::from(area.width.saturating_sub(2))).len();
    u16::try_from(lines).unwrap_or(u16::MAX).saturating_add(2).min(area.height / 2)
}

fn draw_small(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    let [tabs, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    draw_tabs(frame, tabs, dashboard);
    match dashboard.ui.pane {
        // There is room for the events below the loss.
        Pane::Loss => {
            let [upper, lower] = Layout::vertical([Constraint::Percentage(65), Constraint::Percentage(35)]).areas(body);
            draw_pane(frame, upper, Pane::Loss, dashboard);
            draw_pane(frame, lower, Pane::Events, dashboard);
        }
        pane => draw_pane(frame, body, pane, dashboard),
    }
}

fn draw_short(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    draw_pane(frame, area, dashboard.ui.pane, dashboard);
}

fn draw_tabs(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    let tab = |(index, pane): (usize, Pane)| {
        let text = format!(" {} {} ", index + 1, pane.name());
        let is_selected = pane == dashboard.ui.pane;
        [if is_selected { text.reversed().bold() } else { text.dim() }, Span::raw(" ")]
    };
    let tabs: Vec<Span<'_>> = Pane::ALL.into_iter().enumerate().flat_map(tab).collect();
    frame.render_widget(Line::from(tabs), area);
}

fn draw_pane(frame: &mut Frame, area: Rect, pane: Pane, dashboard: &Dashboard<'_>) {
    let Dashboard { run, ui, .. } = dashboard;
    let width = usize::from(area.width.saturating_sub(2));
    match pane {
        Pane::Loss => {
            let block = block(loss_title(run, ui.is_log), pane, ui);
            let style = Style::new().fg(BLUE);
            let (points, marks) = (&run.losses[..], &run.evaluations[..]);
            curve::draw(frame, area, block, &Curve { points, marks, is_log: ui.is_log, from_zero: false, style });
        }
        Pane::Throughput => {
            let block = block("tokens/s".into(), pane, ui);
            let style = Style::new().fg(GREEN);
            let points = &run.throughput[..];
            curve::draw(frame, area, block, &Curve { points, marks: &[], is_log: false, from_zero: true, style });
        }
        Pane::Memory => draw_lines(frame, area, "memory per rank, by kind", pane, memory_lines(dashboard, width), ui),
        Pane::Ranks => {
            draw_lines(frame, area, "ranks and waits", pane, ranks::lines(dashboard.snapshot), ui);
        }
        Pane::Events => {
            let mut lines = events::lines(run.timeline.events(), run.started_s, width);
            if lines.is_empty() {
                lines.push(Line::styled("no events yet", Style::new().dim()));
            }
            draw_lines(frame, area, "events", pane, lines, ui);
        }
    }
}

fn memory_lines(dashboard: &Dashboard<'_>, width: usize) -> Vec<Line<'static>> {
    let start = &dashboard.run.start;
    memory::lines(&dashboard.run.memory, start.memory_limit_bytes, start.ranks, width)
}

/// Draws lines in a block, at the pane's scroll position: events from their end, all others from their start.
fn draw_lines(frame: &mut Frame, area: Rect, title: &str, pane: Pane, lines: Vec<Line<'static>>, ui: &UiState) {
    let height = usize::from(area.height.saturating_sub(2));
    let (hidden, scrolled) = (lines.len().saturating_sub(height), &ui.scrolled[pane as usize]);
    scrolled.set(scrolled.get().min(hidden));
    let first = if pane == Pane::Events { hidden - scrolled.get() } else { scrolled.get() };
    let mut title = Line::from(title.to_string());
    if hidden > 0 && height > 0 {
        title.push_span(format!(" {}-{} of {}", first + 1, first + height, lines.len()).dim());
    }
    let shown: Vec<Line<'_>> = lines.into_iter().skip(first).take(height).collect();
    frame.render_widget(Paragraph::new(shown).block(block(title, pane, ui)), area);
}

fn block<'a>(title: Line<'a>, pane: Pane, ui: &UiState) -> Block<'a> {
    let is_selected = pane == ui.pane;
    let (kind, style) = match is_selected {
        true => (BorderType::Thick, Style::new().fg(BLUE)),
        false => (BorderType::Rounded, Style::new().fg(GREY)),
    };
    let mut spans = vec![Span::raw(" ")];
    spans.extend(title.spans.into_iter().map(|span| {
        let style = Style::new().fg(Color::Reset).patch(span.style);
        span.style(if is_selected { style.bold() } else { style })
    }));
    spans.push(Span::raw(" "));
    Block::bordered().border_type(kind).border_style(style).title(Line::from(spans))
}

fn loss_title(run: &RunView, is_log: bool) -> Line<'static> {
    let mut title = Line::from(if is_log { "loss, logarithmic" } else { "loss" });
    if !run.evaluations.is_empty() {
        title.push_span(", ");
        title.push_span("•".fg(ORANGE).bold());
        title.push_span(" evaluation");
    }
    let not_finite = run.losses.iter().filter(|(_, loss)| !loss.is_finite()).count();
    if not_finite > 0 {
        title.push_span(format!(", {not_finite} not finite").fg(VERMILLION).bold());
    }
    title
}

fn draw_head(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    let run = dashboard.run;
    let status = run.status(now_s());
    let (symbol, colour) = match status {
        Status::Running => ("●", BLUE),
        Status::Finished => ("✔", GREEN),
        Status::Saved => ("◐", ORANGE),
        Status::Interrupted => ("◼", ORANGE),
        Status::Failed => ("✖", VERMILLION),
        Status::Lost => ("?", ORANGE),
    };
    let first = Line::from(vec![
        Span::raw(name(run)).bold(),
        Span::raw("  "),
        Span::styled(format!("{symbol} {}", run.status_text(status)), Style::new().fg(colour).bold()),
    ]);
    let lines = match area.height {
        0..3 => vec![first, fit(&progress(run), area.width)],
        _ => vec![first, fit(&progress(run), area.width), fit(&facts(run), area.width)],
    };
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_foot(frame: &mut Frame, area: Rect, dashboard: &Dashboard<'_>) {
    if let Some(message) = &dashboard.link.message {
        return frame.render_widget(Line::from(message.clone()).bold(), area);
    }
    let keys = [
        ("q", "quit", true),
        ("tab", "pane", true),
        ("l", if dashboard.ui.is_log { "linear" } else { "log" }, true),
        ("↑↓", "scroll", true),
        ("t", "trace 3 steps", dashboard.link.is_live),
        ("s", "save", dashboard.link.is_live),
    ];
    let spans = keys.into_iter().filter(|(.., is_available)| *is_available).flat_map(|(key, action, _)| {
        [Span::styled(format!(" {key} "), Style::new().reversed()), Span::raw(format!(" {action}  "))]
    });
    frame.render_widget(Line::from(spans.collect::<Vec<_>>()), area);
}

/// Joins as many parts as fit.
fn fit(parts: &[String], width: u16) -> Line<'static> {
    let mut text = String::new();
    for part in parts {
        if !text.is_empty() && text.chars().count() + 2 + part.chars().count() > usize::from(width) {
            break;
        }
        if !text.is_empty() {
            text.push_str("  ");
        }
        text.push_str(part);
    }
    Line::from(text)
}
