//! The commands of the control socket, as its server asks for them.

use super::Shared;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vmferry_control::{Answer, Arguments, Command, Machine, QmpError, Version};

/// What our own commands begin with, so that no name of the protocol's will ever mean something else.
pub(super) const PREFIX: &str = "x-vmferry-";

/// The commands. Those that may overtake others never wait.
const COMMANDS: &[Command] = &[
    in_band("x-vmferry-alloc"),
    in_band("x-vmferry-balloon"),
    urgent("x-vmferry-cancel"),
    in_band("x-vmferry-dirty-rate"),
    in_band("x-vmferry-migrate"),
    in_band("x-vmferry-pause"),
    in_band("x-vmferry-quit"),
    in_band("x-vmferry-recover"),
    in_band("x-vmferry-resume"),
    in_band("x-vmferry-stalls"),
    in_band("x-vmferry-status"),
    urgent("x-vmferry-switch"),
    in_band("x-vmferry-verify-guest"),
    in_band("x-vmferry-writes"),
];

const fn in_band(name: &'static str) -> Command {
    Command { name, oob: false }
}

const fn urgent(name: &'static str) -> Command {
    Command { name, oob: true }
}

/// Executes commands for clients of the control socket.
pub(crate) struct Api(pub(crate) Arc<Shared>);

impl Machine for Api {
    fn version(&self) -> Version {
        let number = |text: &str| text.parse().unwrap_or(0);
        Version {
            numbers: [
                number(env!("CARGO_PKG_VERSION_MAJOR")),
                number(env!("CARGO_PKG_VERSION_MINOR")),
                number(env!("CARGO_PKG_VERSION_PATCH")),
            ],
            package: concat!("vmferry-", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    fn commands(&self) -> &[Command] {
        COMMANDS
    }

    fn execute(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError> {
        let Some(own) = name.strip_prefix(PREFIX) else { return Err(QmpError::not_found(name)) };
        self.own(own, arguments)
    }
}

impl Api {
    fn own(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError> {
        let value = self
            .0
            .answer(name, &Value::Object(arguments.0))
            .map_err(|error| QmpError::generic(format!("{error:#}")))?;
        let ended = value["outcome"].is_string();
        let answer = Answer::new(value);
        if !ended {
            return Ok(answer);
        }
        // The process may end as soon as somebody has the report.
        let shared = Arc::clone(&self.0);
        Ok(answer.on_sent(move || shared.seen.store(true, Ordering::Release)))
    }
}
