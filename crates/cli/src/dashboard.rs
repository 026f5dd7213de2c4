//! `shardwise watch`: a dashboard of a run, live or after it has ended.
//!
//! The history of the run comes from its folder, and the state of the ranks from its supervisor ([`source`]). With `--connect`, all of it
//! comes from the supervisor. The dashboard is read-only, except for the requests that its keys send to the supervisor. Drawing
//! ([`draw`]) is a function of the data ([`run_view`]) and of the user interface's state, so tests can check any screen.

mod colors;
mod curve;
mod draw;
mod events;
mod headline;
mod memory;
mod ranks;
mod run_view;
mod source;
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
use shardwise_supervisor::launcher_env::SECRET;
use shardwise_supervisor::read_secret;
use shardwise_watch::{Request, Secret};

use draw::{Dashboard, Pane, UiState};
use source::Source;

/// How often keys are polled, how often the run is refreshed, and the longest time between redraws, since the screen shows elapsed times.
const KEYS_EVERY: Duration = Duration::from_millis(50);
const RUN_EVERY: Duration = Duration::from_millis(250);
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// The number of steps that the trace key requests.
const TRACED_STEPS: u64 = 3;

/// The number of lines that the page keys scroll.
const PAGE: isize = 10;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The folder of the run
    #[arg(required_unless_present = "connect", conflicts_with = "connect")]
    run: Option<PathBuf>,
    /// Watch from another host: connect to the run's supervisor at its --listen address and the port in the run's supervisor.json
    ///
    /// Pass the run's secret in the environment as SHARDWISE_SECRET, or with --secret-file.
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Read the run's secret from a file: a copy of its supervisor.json, or the secret alone
    #[arg(long, value_name = "FILE", requires = "connect")]
    secret_file: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let mut source = match (&options.run, &options.connect) {
        (Some(folder), _) => Source::folder(folder)?,
        (None, Some(host_port)) => Source::channel(resolve(host_port)?, secret(options)?)?,
        (None, None) => bail!("give the folder of a run, or --connect HOST:PORT"),
    };
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        source.wait_for_snapshot();
        // Errors are ignored: the reader of the output may be gone.
        drop(write!(std::io::stdout(), "{}", summary::text(source.run_view(), source.snapshot())));
        return Ok(ExitCode::SUCCESS);
    }
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let result = show(&mut terminal, &mut source);
    ratatui::restore();
    result?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the dashboard until a key ends it.
fn show(terminal: &mut ratatui::DefaultTerminal, source: &mut Source) -> Result<()> {
    let mut ui = UiState::default();
    let (mut refreshed, mut drawn) = (Instant::now(), None::<Instant>);
    loop {
        let mut needs_redraw = drawn.is_none_or(|drawn| drawn.elapsed() >= DRAW_EVERY);
        if refreshed.elapsed() >= RUN_EVERY {
            refreshed = Instant::now();
            needs_redraw |= source.refresh();
        }
        if event::poll(KEYS_EVERY).context("reading keys")? {
            needs_redraw = true;
            match event::read().context("reading keys")? {
                Event::Key(key) if key.kind == KeyEventKind::Release => (),
                Event::Key(key) if !handle_key(key, &mut ui, source) => return Ok(()),
                _ => (),
            }
        }
        if needs_redraw {
            drawn = Some(Instant::now());
            let dashboard =
                Dashboard { run: source.run_view(), snapshot: source.snapshot(), link: source.link(), ui: &ui };
            terminal.draw(|frame| draw::draw(frame, &dashboard)).context("drawing to the terminal")?;
        }
    }
}

/// Handles a key. Returns false if it ends the dashboard.
fn handle_key(key: KeyEvent, ui: &mut UiState, source: &mut Source) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char('t') => source.request(Request::Trace { steps: TRACED_STEPS }),
        KeyCode::Char('s') => source.request(Request::Save),
        KeyCode::Char('l') => ui.is_log = !ui.is_log,
        KeyCode::Tab | KeyCode::Right => ui.pane = ui.pane.next(),
        KeyCode::BackTab | KeyCode::Left => ui.pane = ui.pane.previous(),
        KeyCode::Char(digit @ '1'..='5') => ui.pane = Pane::ALL[digit as usize - '1' as usize],
        KeyCode::Up => ui.scroll(-1),
        KeyCode::Down => ui.scroll(1),
        KeyCode::PageUp => ui.scroll(-PAGE),
        KeyCode::PageDown => ui.scroll(PAGE),
        _ => (),
    }
    true
}

fn resolve(host_port: &str) -> Result<SocketAddr> {
    let found = host_port.to_socket_addrs().with_context(|| format!("--connect {host_port}: write HOST:PORT"))?;
    found.into_iter().next().with_context(|| format!("--connect {host_port}: the host has no address"))
}

fn secret(options: &Options) -> Result<Secret> {
    if let Some(file) = &options.secret_file {
        return Ok(read_secret(file)?);
    }
    let text = std::env::var(SECRET).with_context(|| {
        format!("{SECRET} is not set: it must hold the secret in the run's supervisor.json; or give --secret-file")
    })?;
    Secret::from_hex(&text).context(SECRET)
}
