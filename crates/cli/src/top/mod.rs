//! `vmferry top`: shows guests and their migrations on one screen.
//!
//! A thread for each control socket polls the status. The screen shows the last status and its age.
//! Therefore a socket that hangs, or a process that has ended, does not block the screen.

mod guest;
mod source;
mod view;

use crate::Status;
use crate::usage::wrong_usage;
use anyhow::{Context, Result, bail};
use clap::Args;
use guest::Guest;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use source::{News, Source};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Interval at which the screen is drawn.
const FRAME: Duration = Duration::from_millis(250);
/// Most guests on one screen.
const MOST_GUESTS: usize = 64;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Control sockets of the vmferry processes to watch
    #[arg(long, value_name = "PATH", required = true, num_args = 1..)]
    pub(crate) api: Vec<PathBuf>,
}

pub(crate) fn top(args: &TopArgs) -> Result<Status> {
    let paths: BTreeSet<_> = args.api.iter().collect();
    if paths.len() < args.api.len() {
        wrong_usage!("the same control socket is given twice; give each --api once");
    }
    if paths.len() > MOST_GUESTS {
        wrong_usage!("a screen holds {MOST_GUESTS} guests, not {}; give fewer control sockets", paths.len());
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!(
            "top needs a terminal for its input and output; for programs, use `vmferry status` or `run --metrics`"
        );
    }
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot catch signals")?;
    }
    let (sender, news) = channel();
    let mut screen = Screen::default();
    for (index, path) in args.api.iter().enumerate() {
        let source = Source::start(index, path, sender.clone()).context("cannot start a thread")?;
        screen.guests.push(Guest::new(path));
        screen.sources.push(source);
    }
    let panicked = Arc::new(AtomicBool::new(false));
    let mut terminal = take_terminal(&panicked)?;
    let result = screen.run(&mut terminal, &news, &[&ended, &panicked]);
    ratatui::restore();
    if panicked.load(Ordering::Acquire) {
        bail!("a thread of this screen has panicked; see the message above");
    }
    result.map(|()| Status::Done)
}

/// Takes the terminal for the screen. A panic on any thread restores the terminal, is printed, and
/// ends the screen, which no longer owns the terminal.
fn take_terminal(panicked: &Arc<AtomicBool>) -> Result<DefaultTerminal> {
    // The hook of `try_init` restores the terminal.
    let terminal = ratatui::try_init().context("cannot use this terminal")?;
    let (panicked, hook) = (Arc::clone(panicked), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        panicked.store(true, Ordering::Release);
        hook(info);
    }));
    Ok(terminal)
}

/// Waits for a key, at most for `within`. Returns `false` once the terminal has hung up: reading
/// keys would then never block.
fn terminal_is_readable(within: Duration) -> std::io::Result<bool> {
    let stdin = std::io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    match rustix::event::poll(&mut keys, Some(&within.try_into().unwrap_or_default())) {
        // A signal has interrupted the wait, and its handler has set the flag.
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(!keys[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL))
}

/// State of the screen.
#[derive(Default)]
pub(crate) struct Screen {
    guests: Vec<Guest>,
    sources: Vec<Source>,
    /// Index of the chosen guest.
    chosen: usize,
    help: bool,
    quit: bool,
}

impl Screen {
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        news: &Receiver<News>,
        ends: &[&AtomicBool],
    ) -> Result<()> {
        let ended = || ends.iter().any(|end| end.load(Ordering::Acquire));
        while !self.quit && !ended() {
            while let Ok(news) = news.try_recv() {
                self.take(news);
            }
            let now = Instant::now();
            terminal.draw(|frame| view::draw(frame, self, now)).context("cannot draw")?;
            if !terminal_is_readable(FRAME).context("cannot read keys")? {
                bail!("the terminal is gone");
            }
            // One key for each frame at most would let the screen lag behind a key that is held
            // down, so reading does not wait.
            while !self.quit && event::poll(Duration::ZERO).context("cannot read keys")? {
                if let Event::Key(key) = event::read().context("cannot read keys")? {
                    self.key(key);
                    break;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, news: News) {
        if let Some(guest) = self.guests.get_mut(news.guest) {
            guest.take(Instant::now(), news.what);
        }
    }

    fn key(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        let count = self.guests.len().max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => self.quit = true,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Char('q') | KeyCode::Esc => self.quit = true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = !self.help,
            KeyCode::Tab | KeyCode::Down | KeyCode::Right | KeyCode::Char('j') => {
                self.chosen = (self.chosen + 1) % count
            }
            KeyCode::BackTab | KeyCode::Up | KeyCode::Left | KeyCode::Char('k') => {
                self.chosen = (self.chosen + count - 1) % count;
            }
            KeyCode::Char('d') => {
                if let (Some(guest), Some(source)) =
                    (self.guests.get_mut(self.chosen), self.sources.get(self.chosen))
                {
                    guest.measuring();
                    source.measure();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
