//! What the server needs of whoever executes commands.

use crate::message::{QmpError, Version};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::fmt;
use std::os::fd::OwnedFd;

/// A command that there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// Whether it may overtake others (`exec-oob`): then it never waits for anything.
    pub oob: bool,
}

/// The arguments of a command.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments(pub Map<String, Value>);

impl Arguments {
    /// The arguments as `T`, which says by its type what there may be.
    ///
    /// # Errors
    /// What does not fit, in the words that clients get.
    pub fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        serde_path_to_error::deserialize(Value::Object(self.0))
            .map_err(|error| QmpError::generic(misfit(&error.path().to_string(), &error.inner().to_string())))
    }

    /// Fails if there are any.
    ///
    /// # Errors
    /// If there are any: the first by name.
    pub fn none(&self) -> Result<(), QmpError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(QmpError::generic(format!("Parameter '{name}' is unexpected"))),
        }
    }
}

/// What does not fit at `path`, by the protocol's words where it has some.
fn misfit(path: &str, why: &str) -> String {
    let named = |begin: &str| why.strip_prefix(begin)?.split('`').next();
    // The name may be one that the client made up, of any length.
    let short = |name: &str| name.chars().take(80).collect::<String>();
    if let Some(name) = named("missing field `") {
        return format!("Parameter '{name}' is missing");
    }
    if let Some(name) = named("unknown field `") {
        return format!("Parameter '{}' is unexpected", short(name));
    }
    format!("Invalid parameter '{}': {}", short(path), why.chars().take(400).collect::<String>())
}

/// What a command gives.
pub struct Answer {
    pub(crate) value: Value,
    pub(crate) sent: Option<Box<dyn FnOnce() + Send>>,
}

impl Answer {
    /// An answer.
    #[must_use]
    pub fn new(value: Value) -> Self {
        Self { value, sent: None }
    }

    /// Nothing more to say than that it was done.
    #[must_use]
    pub fn done() -> Self {
        Self::new(json!({}))
    }

    /// Has `sent` called when the last byte of the answer has left this process, and not if its client has gone before.
    #[must_use]
    pub fn on_sent(mut self, sent: impl FnOnce() + Send + 'static) -> Self {
        self.sent = Some(Box::new(sent));
        self
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Self {
        Self::new(value)
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("value", &self.value).finish_non_exhaustive()
    }
}

/// Who executes commands.
///
/// `query-commands`, `query-version` and the negotiation are the server's; every other name comes here, whether there is such a command
/// or not.
pub trait Machine: Send + Sync + 'static {
    /// What it is.
    fn version(&self) -> Version;

    /// The commands that there are.
    fn commands(&self) -> &[Command];

    /// Executes one; called by a thread of the client's own, which may wait in it: nobody else does. Those that may overtake
    /// ([`Command::oob`]) are called by one thread for all clients when they do.
    ///
    /// # Errors
    /// What the client is told.
    fn execute(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError>;

    /// Executes `getfd`, with which the client has passed `descriptor`. A machine that has no such
    /// command need not have this: the descriptor is closed.
    ///
    /// # Errors
    /// What the client is told.
    fn take_descriptor(&self, arguments: Arguments, descriptor: OwnedFd) -> Result<Answer, QmpError> {
        drop(descriptor);
        self.execute("getfd", arguments)
    }
}

/// Executes `name` as the protocol has it: what the server knows itself, and what `machine` does.
pub(crate) fn execute(
    machine: &dyn Machine,
    name: &str,
    arguments: Arguments,
    oob: bool,
    descriptor: Option<OwnedFd>,
) -> Result<Answer, QmpError> {
    const OWN: [&str; 3] = ["qmp_capabilities", "query-commands", "query-version"];
    let own = OWN.contains(&name);
    let command = machine.commands().iter().find(|command| command.name == name);
    if command.is_none() && !own {
        return Err(QmpError::not_found(name));
    }
    if oob && !command.is_some_and(|command| command.oob) {
        return Err(QmpError::generic(format!("The command {name} does not support OOB")));
    }
    match name {
        "query-version" => arguments.none().map(|()| machine.version().to_json().into()),
        "query-commands" => {
            arguments.none()?;
            let names = machine.commands().iter().map(|command| command.name).chain(OWN);
            Ok(Value::Array(names.map(|name| json!({ "name": name })).collect()).into())
        }
        _ => match descriptor {
            Some(descriptor) => machine.take_descriptor(arguments, descriptor),
            None => machine.execute(name, arguments),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Wanted {
        #[serde(rename = "dirty-rate")]
        _rate: u32,
        #[serde(default, rename = "list")]
        _list: Vec<bool>,
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (arguments, says) in [
            (json!({}), "Parameter 'dirty-rate' is missing"),
            (json!({"dirty-rate": 1, "colour": 2}), "Parameter 'colour' is unexpected"),
            (json!({"dirty-rate": "x"}), "Invalid parameter 'dirty-rate': invalid type: string"),
            (json!({"dirty-rate": -1}), "Invalid parameter 'dirty-rate'"),
            (json!({"dirty-rate": 1, "list": [true, 3]}), "Invalid parameter 'list[1]'"),
        ] {
            let Value::Object(map) = arguments else { panic!() };
            let error = Arguments(map).read::<Wanted>().unwrap_err();
            assert!(error.desc.starts_with(says), "{error}");
        }
        assert!(Arguments::default().none().is_ok());
    }
}
