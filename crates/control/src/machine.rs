//! Interface between the server and the machine that executes commands.

use crate::message::{QmpError, Version};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::fmt;
use std::os::fd::OwnedFd;

/// Description of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Name of the command.
    pub name: &'static str,
    /// True if the command may run out of band (`exec-oob`). Such a command must never wait.
    pub oob: bool,
}

/// Arguments of a command.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments(pub Map<String, Value>);

impl Arguments {
    /// Converts the arguments to `T`, whose fields are the permitted arguments.
    ///
    /// # Errors
    /// Returns an error if an argument is missing or of the wrong type. Unexpected arguments are an
    /// error only if `T` denies unknown fields. The error can be sent to the client unchanged.
    pub fn read<T: DeserializeOwned>(self) -> Result<T, QmpError> {
        serde_path_to_error::deserialize(Value::Object(self.0))
            .map_err(|error| QmpError::generic(misfit(&error.path().to_string(), &error.inner().to_string())))
    }

    /// Checks that there are no arguments.
    ///
    /// # Errors
    /// Returns an error if there are arguments. The error names the first one in alphabetical
    /// order.
    pub fn none(&self) -> Result<(), QmpError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(QmpError::generic(format!("Parameter '{name}' is unexpected"))),
        }
    }
}

/// Returns the error text for the argument at `path`, in the words of QEMU if it has such an error.
fn misfit(path: &str, why: &str) -> String {
    let named = |begin: &str| why.strip_prefix(begin)?.split('`').next();
    // The client may have chosen the name, so it may have any length.
    let short = |name: &str| name.chars().take(80).collect::<String>();
    if let Some(name) = named("missing field `") {
        return format!("Parameter '{name}' is missing");
    }
    if let Some(name) = named("unknown field `") {
        return format!("Parameter '{}' is unexpected", short(name));
    }
    format!("Invalid parameter '{}': {}", short(path), why.chars().take(400).collect::<String>())
}

/// Answer to a command.
pub struct Answer {
    pub(crate) value: Value,
    pub(crate) sent: Option<Box<dyn FnOnce() + Send>>,
}

impl Answer {
    /// Creates an answer with the value `value`.
    #[must_use]
    pub fn new(value: Value) -> Self {
        Self { value, sent: None }
    }

    /// Creates the empty answer, which only confirms that the command was executed.
    #[must_use]
    pub fn done() -> Self {
        Self::new(json!({}))
    }

    /// Sets a function that is called after the last byte of the answer has been written to the
    /// socket. The function is not called if the client disconnects before.
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

/// Machine that executes commands.
///
/// The server itself executes `query-commands`, `query-version` and `qmp_capabilities`. The machine
/// receives only commands that [`commands`](Self::commands) lists.
pub trait Machine: Send + Sync + 'static {
    /// Returns the version of the program.
    fn version(&self) -> Version;

    /// Returns the commands of this machine.
    fn commands(&self) -> &[Command];

    /// Executes the command `name`.
    ///
    /// Each client has its own thread, so this method may wait without a delay for other clients.
    /// Out-of-band commands ([`Command::oob`]) of all clients run on one thread, so they must not
    /// wait.
    ///
    /// # Errors
    /// Returns an error if the command fails. The server sends the error to the client.
    fn execute(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError>;

    /// Executes the command `getfd`, with which the client has passed `descriptor`. The default
    /// implementation closes the descriptor and executes the command without it.
    ///
    /// # Errors
    /// Returns an error if the command fails. The server sends the error to the client.
    fn take_descriptor(&self, arguments: Arguments, descriptor: OwnedFd) -> Result<Answer, QmpError> {
        drop(descriptor);
        self.execute("getfd", arguments)
    }
}

/// Executes the command `name`, which is one of the server's own commands or a command of
/// `machine`.
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
    fn wrong_arguments_are_named() {
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
