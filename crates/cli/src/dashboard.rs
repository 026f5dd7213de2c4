//! `shardwise watch`: a run on a screen, while it is at work or afterwards.
//!
//! What is shown comes from the run's folder ([`source`]), and where the ranks are from its supervisor, over the channel; from
//! elsewhere all of it comes over the channel. It changes nothing about a run but what its keys ask the supervisor for. Drawing
//! ([`draw`]) is a function of what is known ([`story`]) and of the keys that were pressed, so that tests can look at any screen.

mod curve;
mod draw;
mod events;
mod memory;
mod ranks;
mod source;
mod story;
mod summary;
#[cfg(test)]
mod tests;

use std::io::{IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use shardwise_watch::{Request, Secret};

use crate::door::secret_in;
use crate::launched::SECRET;
use draw::{Keys, Pane};
use source::Source;

/// How often keys are looked for, how often the run is, and how often the screen is drawn in any case: times on it pass.
const KEYS_EVERY: Duration = Duration::from_millis(50);
const RUN_EVERY: Duration = Duration::from_millis(250);
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// How many steps the key traces.
const TRACED_STEPS: u64 = 3;

/// How far a page is.
const PAGE: isize = 10;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The run's folder
    #[arg(required_unless_present = "connect", conflicts_with = "connect")]
    run: Option<PathBuf>,
    /// Look on from elsewhere: where the run's supervisor listens (its --listen, and the port that is in the run's supervisor.json)
    ///
    /// The run's secret is in the environment as SHARDWISE_SECRET, or in a file.
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// A file with the run's secret: a copy of its supervisor.json, or the secret alone
    #[arg(long, value_name = "FILE", requires = "connect")]
    secret_file: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let mut source = match (&options.run, &options.connect) {
        (Some(folder), _) => Source::folder(folder)?,
        (None, Some(place)) => Source::channel(address(place)?, secret(options)?)?,
        (None, None) => bail!("give a run's folder, or --connect"),
    };
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        source.settle();
        // Whoever reads it may be gone.
        drop(write!(std::io::stdout(), "{}", summary::text(source.story(), source.snapshot())));
        return Ok(ExitCode::SUCCESS);
    }
    let mut terminal = ratatui::try_init().context("the terminal")?;
    let ended = look_on(&mut terminal, &mut source);
    ratatui::restore();
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// Until it is asked to end.
fn look_on(terminal: &mut ratatui::DefaultTerminal, source: &mut Source) -> Result<()> {
    let mut keys = Keys::default();
    let (mut looked, mut drawn) = (Instant::now(), None::<Instant>);
    loop {
        let mut is_new = drawn.is_none_or(|drawn| drawn.elapsed() >= DRAW_EVERY);
        if looked.elapsed() >= RUN_EVERY {
            looked = Instant::now();
            is_new |= source.refresh();
        }
        if event::poll(KEYS_EVERY).context("the terminal's keys")? {
            is_new = true;
            match event::read().context("the terminal's keys")? {
                Event::Key(key) if key.kind == KeyEventKind::Release => (),
                Event::Key(key) if !pressed(key, &mut keys, source) => return Ok(()),
                _ => (),
            }
        }
        if is_new {
            drawn = Some(Instant::now());
            let scene =
                draw::Scene { story: source.story(), snapshot: source.snapshot(), link: source.link(), keys: &keys };
            terminal.draw(|frame| draw::draw(frame, &scene)).context("the terminal")?;
        }
    }
}

/// Does what a key is for. Whether there is more to look at.
fn pressed(key: KeyEvent, keys: &mut Keys, source: &mut Source) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char('t') => source.ask(Request::Trace { steps: TRACED_STEPS }),
        KeyCode::Char('s') => source.ask(Request::Save),
        KeyCode::Char('l') => keys.is_log = !keys.is_log,
        KeyCode::Tab | KeyCode::Right => keys.pane = keys.pane.next(),
        KeyCode::BackTab | KeyCode::Left => keys.pane = keys.pane.before(),
        KeyCode::Char(digit @ '1'..='5') => keys.pane = Pane::ALL[digit as usize - '1' as usize],
        KeyCode::Up => keys.scroll(-1),
        KeyCode::Down => keys.scroll(1),
        KeyCode::PageUp => keys.scroll(-PAGE),
        KeyCode::PageDown => keys.scroll(PAGE),
        _ => (),
    }
    true
}

fn address(place: &str) -> Result<SocketAddr> {
    let found = place.to_socket_addrs().with_context(|| format!("--connect {place}: HOST:PORT is expected"))?;
    found.into_iter().next().with_context(|| format!("--connect {place}: that host has no address"))
}

fn secret(options: &Options) -> Result<Secret> {
    if let Some(file) = &options.secret_file {
        return secret_in(file);
    }
    let text = std::env::var(SECRET)
        .with_context(|| format!("{SECRET}: the run's secret is in its supervisor.json; or give --secret-file"))?;
    Secret::from_hex(&text).context(SECRET)
}
