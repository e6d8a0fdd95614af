//! Commands of the control socket.

use super::RunContext;
use super::migration::refused;
use crate::advice;
use crate::handed::PassArguments;
use crate::successor::AskArguments;
use serde::Deserialize;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_client::PREFIX;
use vmferry_control::{Answer, Arguments, Command, Machine, QmpError, Version};

/// Commands of the control socket. Out-of-band commands never wait.
const COMMANDS: &[Command] = &[
    in_band("balloon"),
    in_band("calc-dirty-rate"),
    in_band("cancel-vcpu-dirty-limit"),
    in_band("closefd"),
    in_band("cont"),
    in_band("getfd"),
    in_band("migrate"),
    in_band("migrate-incoming"),
    urgent("migrate-pause"),
    urgent("migrate-recover"),
    in_band("migrate-set-capabilities"),
    in_band("migrate-set-parameters"),
    in_band("migrate-start-postcopy"),
    in_band("migrate_cancel"),
    in_band("qom-get"),
    in_band("qom-set"),
    in_band("query-balloon"),
    in_band("query-cpus-fast"),
    in_band("query-dirty-rate"),
    in_band("query-kvm"),
    in_band("query-migrate"),
    in_band("query-migrate-capabilities"),
    in_band("query-migrate-parameters"),
    in_band("query-name"),
    in_band("query-status"),
    in_band("query-uuid"),
    in_band("query-vcpu-dirty-limit"),
    in_band("quit"),
    in_band("set-vcpu-dirty-limit"),
    in_band("stop"),
    in_band("system_powerdown"),
    in_band("x-vmferry-alloc"),
    in_band("x-vmferry-arguments"),
    in_band("x-vmferry-balloon"),
    in_band("x-vmferry-branch"),
    urgent("x-vmferry-cancel"),
    in_band("x-vmferry-dirty-rate"),
    in_band("x-vmferry-migrate"),
    in_band("x-vmferry-pass-descriptors"),
    in_band("x-vmferry-pause"),
    in_band("x-vmferry-plan"),
    in_band("x-vmferry-powerdown"),
    in_band("x-vmferry-quit"),
    in_band("x-vmferry-record-end"),
    in_band("x-vmferry-recover"),
    in_band("x-vmferry-resume"),
    in_band("x-vmferry-snapshot"),
    in_band("x-vmferry-snapshot-pause"),
    in_band("x-vmferry-snapshot-resume"),
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

/// Arguments of vmferry's own commands that have none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recover {
    #[serde(rename = "take")]
    _take: Option<bool>,
}

/// Arguments of `getfd` and `closefd`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    fdname: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Balloon {
    #[serde(rename = "target")]
    _target: Option<u64>,
    #[serde(rename = "reporting")]
    _reporting: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotResume {
    #[serde(rename = "error")]
    _error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Verify {
    #[serde(rename = "request")]
    _request: u64,
}

/// Checks the arguments of a vmferry command. Unknown arguments are refused, so that a client does
/// not assume that they have an effect.
fn check(name: &str, arguments: &Arguments) -> Result<(), QmpError> {
    let arguments = arguments.clone();
    match name {
        "migrate" | "dirty-rate" | "plan" | "snapshot" | "branch" => Ok(()),
        "snapshot-resume" => arguments.read::<SnapshotResume>().map(drop),
        "arguments" => arguments.read::<AskArguments>().map(drop),
        "pass-descriptors" => arguments.read::<PassArguments>().map(drop),
        "recover" => arguments.read::<Recover>().map(drop),
        "balloon" => arguments.read::<Balloon>().map(drop),
        "verify-guest" => arguments.read::<Verify>().map(drop),
        _ => arguments.read::<Nothing>().map(drop),
    }
}

/// Executes commands for clients of the control socket.
pub(crate) struct Api(pub(crate) Arc<RunContext>);

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
        if let Some(own) = name.strip_prefix(PREFIX) {
            return self.own(own, arguments);
        }
        match name {
            "balloon" => self.balloon(arguments),
            "calc-dirty-rate" => self.calc_dirty_rate(arguments),
            "cancel-vcpu-dirty-limit" => self.cancel_limit(arguments),
            "closefd" => self.close_descriptor(arguments),
            "getfd" => Err(QmpError::generic(
                "getfd takes one descriptor, which must be passed with the bytes of the command (SCM_RIGHTS); this command came with none or with several",
            )),
            "migrate" => self.migrate(arguments),
            "migrate-incoming" => self.migrate_incoming(arguments),
            "migrate-recover" => self.migrate_recover(arguments),
            "migrate-set-capabilities" => self.set_options(|options| options.set_capabilities(arguments)),
            "migrate-set-parameters" => self.set_options(|options| options.set_parameters(arguments)),
            "qom-get" => self.qom_get(arguments),
            "qom-set" => self.qom_set(arguments),
            "set-vcpu-dirty-limit" => self.set_limit(arguments),
            "query-dirty-rate" => self.query_dirty_rate(arguments),
            _ => arguments.none().and_then(|()| self.plain(name)),
        }
    }

    fn take_descriptor(&self, arguments: Arguments, descriptor: OwnedFd) -> Result<Answer, QmpError> {
        let Descriptor { fdname } = arguments.read()?;
        self.0.descriptors.add(&fdname, descriptor).map_err(refused)?;
        Ok(Answer::done())
    }
}

impl Api {
    /// Executes `closefd`.
    fn close_descriptor(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Descriptor { fdname } = arguments.read()?;
        self.0.descriptors.take(&[fdname]).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes a command without arguments.
    fn plain(&self, name: &str) -> Result<Answer, QmpError> {
        Ok(match name {
            "cont" => self.cont()?,
            "migrate-pause" => self.migrate_pause()?,
            "migrate-start-postcopy" => self.start_postcopy()?,
            "migrate_cancel" => self.migrate_cancel()?,
            "query-balloon" => self.query_balloon()?,
            "query-cpus-fast" => self.query_cpus().into(),
            "query-kvm" => self.query_kvm().into(),
            "query-migrate" => self.query_migrate(),
            "query-migrate-capabilities" => self.0.options().capabilities().into(),
            "query-migrate-parameters" => self.0.options().parameters().into(),
            // vmferry has no option for either value.
            "query-name" => Answer::done(),
            "query-uuid" => json!({ "UUID": "00000000-0000-0000-0000-000000000000" }).into(),
            "query-status" => self.query_status().into(),
            "query-vcpu-dirty-limit" => self.query_limits().into(),
            "quit" => self.own("quit", Arguments::default())?,
            "stop" => self.stop()?,
            "system_powerdown" => self.own("powerdown", Arguments::default())?,
            _ => return Err(QmpError::not_found(name)),
        })
    }

    fn own(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError> {
        check(name, &arguments)?;
        let value = self
            .0
            .answer(name, &Value::Object(arguments.0))
            .map_err(|error| QmpError::generic(advice::told(&error)))?;
        let ended = value["outcome"].is_string();
        let answer = Answer::new(value);
        if !ended {
            return Ok(answer);
        }
        // The process may end as soon as a client has read the report.
        let shared = Arc::clone(&self.0);
        Ok(answer.on_sent(move || shared.audience.saw()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_arguments_of_own_commands_are_refused() {
        let check = |name: &str, value: Value| match value {
            Value::Object(map) => check(name, &Arguments(map)),
            _ => panic!(),
        };
        for (name, value) in [
            ("status", json!({})),
            ("arguments", json!({})),
            ("arguments", json!({"fdname": "x"})),
            ("recover", json!({"take": null})),
            ("recover", json!({"take": false})),
            ("balloon", json!({"target": 5})),
            ("balloon", json!({"reporting": false})),
            ("verify-guest", json!({"request": 1})),
        ] {
            check(name, value).unwrap();
        }
        for (name, value, says) in [
            ("pause", json!({"x": 1}), "'x' is unexpected"),
            ("quit", json!({"force": true}), "'force' is unexpected"),
            ("recover", json!({"take": "x"}), "'take'"),
            ("recover", json!({"abandon": true}), "'abandon' is unexpected"),
            ("balloon", json!({"value": 5}), "'value' is unexpected"),
            ("balloon", json!({"reporting": "off"}), "'reporting'"),
            ("verify-guest", json!({}), "'request' is missing"),
        ] {
            let error = check(name, value).unwrap_err();
            assert!(error.desc.contains(says), "{name}: {error}");
        }
    }
}
