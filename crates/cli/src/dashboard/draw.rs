//! The screens: a wide one with all panes, and a narrow one with the loss and one more.
//!
//! Colours are those of Okabe and Ito, which people who cannot tell red from green can tell apart; whatever a colour says, a symbol
//! or a pattern says as well.

use std::cell::Cell;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Paragraph};
use shardwise_watch::Snapshot;

use super::curve::{self, Curve};
use super::source::Link;
use super::story::{Status, Story};
use super::summary::now_s;
use super::{events, memory, ranks};
use crate::bar::{lasting, memory as amount, short, thousands};

pub(crate) const BLUE: Color = Color::Rgb(86, 180, 233);
pub(crate) const GREEN: Color = Color::Rgb(0, 158, 115);
pub(crate) const ORANGE: Color = Color::Rgb(230, 159, 0);
pub(crate) const YELLOW: Color = Color::Rgb(240, 228, 66);
pub(crate) const PURPLE: Color = Color::Rgb(204, 121, 167);
pub(crate) const VERMILLION: Color = Color::Rgb(213, 94, 0);
pub(crate) const GREY: Color = Color::Rgb(128, 128, 128);

/// From which size on there is room for all panes at once, and below which for one alone.
const WIDE: (u16, u16) = (110, 30);
const LOW: u16 = 18;

/// What is drawn.
pub(crate) struct Scene<'a> {
    pub(crate) story: &'a Story,
    pub(crate) snapshot: Option<&'a Snapshot>,
    pub(crate) link: Link,
    pub(crate) keys: &'a Keys,
}

/// A part of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pane {
    #[default]
    Loss,
    Speed,
    Memory,
    Ranks,
    Events,
}

impl Pane {
    pub(crate) const ALL: [Pane; 5] = [Pane::Loss, Pane::Speed, Pane::Memory, Pane::Ranks, Pane::Events];

    fn name(self) -> &'static str {
        match self {
            Pane::Loss => "loss",
            Pane::Speed => "speed",
            Pane::Memory => "memory",
            Pane::Ranks => "ranks",
            Pane::Events => "events",
        }
    }

    pub(crate) fn next(self) -> Self {
        Pane::ALL[(self as usize + 1) % Pane::ALL.len()]
    }

    pub(crate) fn before(self) -> Self {
        Pane::ALL[(self as usize + Pane::ALL.len() - 1) % Pane::ALL.len()]
    }
}

/// What keys have changed.
#[derive(Default)]
pub(crate) struct Keys {
    pub(crate) pane: Pane,
    pub(crate) is_log: bool,
    /// How far each pane is scrolled. Drawing, which knows the lines, keeps them within those.
    pub(crate) scrolled: [Cell<usize>; 5],
}

impl Keys {
    /// Scrolls the pane that is looked at. Events are read from their end.
    pub(crate) fn scroll(&self, lines: isize) {
        let scrolled = &self.scrolled[self.pane as usize];
        let lines = if self.pane == Pane::Events { -lines } else { lines };
        scrolled.set(scrolled.get().saturating_add_signed(lines));
    }
}

/// Draws all of it.
pub(crate) fn draw(frame: &mut Frame, scene: &Scene<'_>) {
    let area = frame.area();
    let head_lines = if area.height < LOW { 2 } else { 3 };
    let parts = [Constraint::Length(head_lines), Constraint::Min(0), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(parts).areas(area);
    draw_head(frame, head, scene);
    match (area.width >= WIDE.0 && area.height >= WIDE.1, area.height < LOW) {
        (true, _) => draw_wide(frame, body, scene),
        (false, false) => draw_narrow(frame, body, scene),
        (false, true) => draw_low(frame, body, scene),
    }
    draw_foot(frame, foot, scene);
}

fn draw_wide(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    // Where nobody says where the ranks are, what has happened takes that place.
    let events_lines = if scene.snapshot.is_some() { (area.height / 4).max(6) } else { 0 };
    let [upper, lower] = Layout::vertical([Constraint::Min(0), Constraint::Length(events_lines)]).areas(area);
    let [left, right] = Layout::horizontal([Constraint::Percentage(55), Constraint::Percentage(45)]).areas(upper);
    let [loss, speed] = Layout::vertical([Constraint::Percentage(64), Constraint::Percentage(36)]).areas(left);
    let held = memory_height(scene, right);
    let [memory, rest] = Layout::vertical([Constraint::Length(held), Constraint::Min(0)]).areas(right);
    for (pane, area) in [(Pane::Loss, loss), (Pane::Speed, speed), (Pane::Memory, memory)] {
        draw_pane(frame, area, pane, scene);
    }
    match scene.snapshot {
        Some(_) => {
            draw_pane(frame, rest, Pane::Ranks, scene);
            draw_pane(frame, lower, Pane::Events, scene);
        }
        None => draw_pane(frame, rest, Pane::Events, scene),
    }
}

/// As high as its lines are, but leaves half to the others.
fn memory_height(scene: &Scene<'_>, area: Rect) -> u16 {
    let lines = memory_lines(scene, usize::from(area.width.saturating_sub(2))).len();
    u16::try_from(lines).unwrap_or(u16::MAX).saturating_add(2).min(area.height / 2)
}

fn draw_narrow(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    let [tabs, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    draw_tabs(frame, tabs, scene);
    match scene.keys.pane {
        // What has happened is of interest beside the loss.
        Pane::Loss => {
            let [upper, lower] = Layout::vertical([Constraint::Percentage(65), Constraint::Percentage(35)]).areas(body);
            draw_pane(frame, upper, Pane::Loss, scene);
            draw_pane(frame, lower, Pane::Events, scene);
        }
        pane => draw_pane(frame, body, pane, scene),
    }
}

fn draw_low(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    draw_pane(frame, area, scene.keys.pane, scene);
}

fn draw_tabs(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    let tab = |(index, pane): (usize, Pane)| {
        let text = format!(" {} {} ", index + 1, pane.name());
        let is_chosen = pane == scene.keys.pane;
        [if is_chosen { text.reversed().bold() } else { text.dim() }, Span::raw(" ")]
    };
    let tabs: Vec<Span<'_>> = Pane::ALL.into_iter().enumerate().flat_map(tab).collect();
    frame.render_widget(Line::from(tabs), area);
}

fn draw_pane(frame: &mut Frame, area: Rect, pane: Pane, scene: &Scene<'_>) {
    let Scene { story, keys, .. } = scene;
    let width = usize::from(area.width.saturating_sub(2));
    match pane {
        Pane::Loss => {
            let block = block(loss_title(story, keys.is_log), pane, keys);
            let style = Style::new().fg(BLUE);
            let (points, marks) = (&story.losses[..], &story.held_out[..]);
            curve::draw(frame, area, block, &Curve { points, marks, is_log: keys.is_log, from_zero: false, style });
        }
        Pane::Speed => {
            let block = block("tokens/s".into(), pane, keys);
            let style = Style::new().fg(GREEN);
            let points = &story.speeds[..];
            curve::draw(frame, area, block, &Curve { points, marks: &[], is_log: false, from_zero: true, style });
        }
        Pane::Memory => draw_lines(frame, area, "memory by kind, of each rank", pane, memory_lines(scene, width), keys),
        Pane::Ranks => {
            draw_lines(frame, area, "who waits for whom", pane, ranks::lines(scene.snapshot), keys);
        }
        Pane::Events => {
            let mut lines = events::lines(story.told.events(), story.began_s, width);
            if lines.is_empty() {
                lines.push(Line::styled("nothing has happened yet", Style::new().dim()));
            }
            draw_lines(frame, area, "events", pane, lines, keys);
        }
    }
}

fn memory_lines(scene: &Scene<'_>, width: usize) -> Vec<Line<'static>> {
    let start = &scene.story.start;
    memory::lines(&scene.story.memory, start.memory_limit_bytes, start.ranks, width)
}

/// Lines in a block, as far as they are scrolled; events from their end, all others from their beginning.
fn draw_lines(frame: &mut Frame, area: Rect, title: &str, pane: Pane, lines: Vec<Line<'static>>, keys: &Keys) {
    let height = usize::from(area.height.saturating_sub(2));
    let (hidden, scrolled) = (lines.len().saturating_sub(height), &keys.scrolled[pane as usize]);
    scrolled.set(scrolled.get().min(hidden));
    let first = if pane == Pane::Events { hidden - scrolled.get() } else { scrolled.get() };
    let mut title = Line::from(title.to_string());
    if hidden > 0 && height > 0 {
        title.push_span(format!(" {}-{} of {}", first + 1, first + height, lines.len()).dim());
    }
    let shown: Vec<Line<'_>> = lines.into_iter().skip(first).take(height).collect();
    frame.render_widget(Paragraph::new(shown).block(block(title, pane, keys)), area);
}

fn block<'a>(title: Line<'a>, pane: Pane, keys: &Keys) -> Block<'a> {
    let is_chosen = pane == keys.pane;
    let (kind, style) = match is_chosen {
        true => (BorderType::Thick, Style::new().fg(BLUE)),
        false => (BorderType::Rounded, Style::new().fg(GREY)),
    };
    let mut spans = vec![Span::raw(" ")];
    spans.extend(title.spans.into_iter().map(|span| {
        let style = Style::new().fg(Color::Reset).patch(span.style);
        span.style(if is_chosen { style.bold() } else { style })
    }));
    spans.push(Span::raw(" "));
    Block::bordered().border_type(kind).border_style(style).title(Line::from(spans))
}

fn loss_title(story: &Story, is_log: bool) -> Line<'static> {
    let mut title = Line::from(if is_log { "loss, logarithmic" } else { "loss" });
    if !story.held_out.is_empty() {
        title.push_span(", ");
        title.push_span("•".fg(ORANGE).bold());
        title.push_span(" held out");
    }
    let not_finite = story.losses.iter().filter(|(_, loss)| !loss.is_finite()).count();
    if not_finite > 0 {
        title.push_span(format!(", {not_finite} not finite").fg(VERMILLION).bold());
    }
    title
}

fn draw_head(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    let story = scene.story;
    let status = story.status(now_s());
    let (symbol, colour) = match status {
        Status::Running => ("●", BLUE),
        Status::Finished => ("✔", GREEN),
        Status::Saved => ("◐", ORANGE),
        Status::Interrupted => ("◼", ORANGE),
        Status::Failed => ("✖", VERMILLION),
        Status::Quiet => ("?", ORANGE),
    };
    let first = Line::from(vec![
        Span::raw(name(story)).bold(),
        Span::raw("  "),
        Span::styled(format!("{symbol} {}", story.status_text(status)), Style::new().fg(colour).bold()),
    ]);
    let lines = match area.height {
        0..3 => vec![first, fitted(&progress(story), area.width)],
        _ => vec![first, fitted(&progress(story), area.width), fitted(&facts(story), area.width)],
    };
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_foot(frame: &mut Frame, area: Rect, scene: &Scene<'_>) {
    if let Some(said) = &scene.link.said {
        return frame.render_widget(Line::from(said.clone()).bold(), area);
    }
    let keys = [
        ("q", "quit", true),
        ("tab", "pane", true),
        ("l", if scene.keys.is_log { "linear" } else { "log" }, true),
        ("↑↓", "scroll", true),
        ("t", "trace 3 steps", scene.link.is_live),
        ("s", "save", scene.link.is_live),
    ];
    let spans = keys.into_iter().filter(|(.., is_of_use)| *is_of_use).flat_map(|(key, does, _)| {
        [Span::styled(format!(" {key} "), Style::new().reversed()), Span::raw(format!(" {does}  "))]
    });
    frame.render_widget(Line::from(spans.collect::<Vec<_>>()), area);
}

/// The run's name.
pub(crate) fn name(story: &Story) -> String {
    match story.start.name.is_empty() {
        true => "a run".to_string(),
        false => story.start.name.clone(),
    }
}

/// As many of these as there is room for, the first ones first.
fn fitted(parts: &[String], width: u16) -> Line<'static> {
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

/// How far it is, and how well it does.
pub(crate) fn progress(story: &Story) -> Vec<String> {
    let Some(last) = &story.last else { return vec!["no step has been made yet".to_string()] };
    let share = 100. * last.step as f64 / story.start.steps.max(1) as f64;
    let mut parts = vec![format!("step {}/{} ({share:.0}%)", last.step, story.start.steps)];
    parts.push(format!("loss {}", short(last.loss)));
    if let Some(held_out) = &story.last_held_out {
        parts.push(format!("held out {}", short(held_out.loss)));
    }
    let is_running = story.status(now_s()) == Status::Running;
    match story.left_s.filter(|left_s| *left_s > 0. && is_running) {
        Some(left_s) => parts.push(format!("left {}", lasting(left_s))),
        None => parts.push(format!("took {}", lasting(story.last_s - story.began_s))),
    }
    parts
}

/// How fast it is, and what it is.
pub(crate) fn facts(story: &Story) -> Vec<String> {
    let (start, mut parts) = (&story.start, Vec::new());
    if let Some(last) = &story.last {
        if let Some((_, speed)) = story.speeds.last() {
            parts.push(format!("{} tokens/s", thousands(*speed)));
        }
        if let Some(part) = last.known_utilisation() {
            parts.push(format!("{:.0}% of peak", 100. * part));
        }
        if last.memory_bytes > 0 {
            parts.push(amount(last.memory_bytes, start.memory_limit_bytes));
        }
    }
    if start.ranks > 0 {
        let ranks = if start.ranks == 1 { "1 rank".to_string() } else { format!("{} ranks", start.ranks) };
        parts.push(format!("{ranks}, stage {}, {}", start.stage, start.precision));
        parts.push(format!("{} parameters", thousands(start.parameters as f64)));
    }
    if story.told.lost_s() > 0. {
        parts.push(format!("lost {} to restarts", lasting(story.told.lost_s())));
    }
    parts
}
