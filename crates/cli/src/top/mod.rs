//! `vmferry top`: guests and their migrations on one screen.
//!
//! A thread for each control socket asks for the status, again and again; the screen shows what came last and how old it is. So
//! a socket that hangs, or a vmferry that has gone, costs the screen nothing.

mod guest;
mod source;
mod view;

use crate::Status;
use anyhow::{Context, Result, bail};
use clap::Args;
use guest::Guest;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use source::{News, Source};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How often the screen is drawn.
const FRAME: Duration = Duration::from_millis(250);
/// Most guests on one screen.
const MOST_GUESTS: usize = 64;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Control sockets of the vmferrys that are watched
    #[arg(long, value_name = "PATH", required = true, num_args = 1..)]
    pub(crate) api: Vec<PathBuf>,
}

pub(crate) fn top(args: &TopArgs) -> Result<Status> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("top needs a terminal; for programs there are `vmferry status` and `run --metrics`");
    }
    let paths: BTreeSet<_> = args.api.iter().collect();
    if paths.len() < args.api.len() {
        bail!("the same control socket is given twice");
    }
    if paths.len() > MOST_GUESTS {
        bail!("{} guests are more than the {MOST_GUESTS} that a screen holds", paths.len());
    }
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).context("cannot catch signals")?;
    }
    let (tell, news) = channel();
    let mut screen = Screen::default();
    for (index, path) in args.api.iter().enumerate() {
        let source = Source::start(index, path, tell.clone()).context("cannot start a thread")?;
        screen.guests.push(Guest::new(path));
        screen.sources.push(source);
    }
    // It also sees to it that a panic leaves the terminal as it was.
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let result = screen.run(&mut terminal, &news, &ended);
    ratatui::restore();
    result.map(|()| Status::Done)
}

/// Everything that is shown.
#[derive(Default)]
pub(crate) struct Screen {
    guests: Vec<Guest>,
    sources: Vec<Source>,
    /// Which guest is looked at.
    chosen: usize,
    help: bool,
    quit: bool,
}

impl Screen {
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        news: &Receiver<News>,
        ended: &AtomicBool,
    ) -> Result<()> {
        while !self.quit && !ended.load(Ordering::Acquire) {
            while let Ok(news) = news.try_recv() {
                self.take(news);
            }
            let now = Instant::now();
            terminal.draw(|frame| view::draw(frame, self, now)).context("cannot draw")?;
            let next = now + FRAME;
            // Each key at once, or the screen would lag behind whoever holds one down.
            while !self.quit
                && event::poll(next.saturating_duration_since(Instant::now())).context("cannot read keys")?
            {
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
