//! Register for each migration in etcd 3.4 or later, over its JSON gateway (`/v3/kv/...`): HTTP
//! requests, each with one transaction.
//!
//! The register is the key `PREFIX` + migration id, with `open`, `source`, `target` or `target
//! runs` as its value. Each request is one transaction: a comparison, a write if it holds, and a
//! read of the key if not. etcd orders transactions by consensus, and each member answers only with
//! what the cluster has agreed on. Therefore any member of a cluster can be asked.

use super::answer::{self, OPEN, RUNS, SOURCE, TARGET};
use crate::http_client;
use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use ureq::Agent;
use vmferry_engine::arbiter::{Arbiter, ArbiterError, ArbiterRequest, MigrationId, Ownership, Side};

/// Longest time that one member may take for a whole answer. In a unit test, it is longer than the
/// pauses of a thread on a starved host.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 2 });
/// Most bytes of an answer; a real one has a few hundred.
const MOST_BYTES: u64 = 64 << 10;

pub(super) struct Etcd {
    agent: Agent,
    endpoints: Vec<String>,
    /// Index of the endpoint that answered last, which is asked first.
    answered: AtomicUsize,
    prefix: String,
    login: Option<Login>,
}

/// Credentials for an etcd: contents of files, not their names.
#[derive(Default)]
pub(super) struct Access {
    /// Certificates of the trusted authorities, PEM.
    pub(super) ca: Option<Vec<u8>>,
    /// Client certificate and its key, PEM.
    pub(super) own: Option<(Vec<u8>, Vec<u8>)>,
    /// Name and password of a user.
    pub(super) user: Option<(String, String)>,
}

/// A user of etcd, and a token that etcd accepts for the user for some time (minutes, by default).
struct Login {
    name: String,
    password: String,
    token: Mutex<Option<String>>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("endpoints", &self.endpoints).field("prefix", &self.prefix).finish()
    }
}

impl Etcd {
    pub(super) fn new(endpoints: Vec<String>, prefix: String, access: Access) -> Result<Self> {
        let Access { ca, own, user } = access;
        let login = user.map(|(name, password)| Login { name, password, token: Mutex::default() });
        let own = own.as_ref().map(|(chain, key)| (chain.as_slice(), key.as_slice()));
        let agent = http_client::agent(ca.as_deref(), own, PATIENCE)?;
        Ok(Self { agent, endpoints, answered: AtomicUsize::new(0), prefix, login })
    }

    fn key(&self, migration: MigrationId) -> String {
        format!("{}{migration}", self.prefix)
    }

    /// Sends one request to each member in turn until one answers.
    ///
    /// The member that answered last is asked first, so a member that does not answer costs its
    /// time once and not with every request. A member that gave no answer may still have executed
    /// the request.
    fn post(&self, path: &str, body: &Value) -> Result<Value, ArbiterError> {
        self.post_repeatedly(path, body).map(|(answer, _)| answer)
    }

    /// Like [`post`](Self::post). The second value is true if an earlier member gave no answer.
    fn post_repeatedly(&self, path: &str, body: &Value) -> Result<(Value, bool), ArbiterError> {
        let mut why = String::new();
        let first = self.answered.load(Ordering::Relaxed);
        for at in (first..self.endpoints.len()).chain(0..first) {
            let endpoint = &self.endpoints[at];
            match self.post_authorized(endpoint, path, body) {
                Ok(answer) => {
                    self.answered.store(at, Ordering::Relaxed);
                    return Ok((answer, !why.is_empty()));
                }
                Err(error) => {
                    let between = if why.is_empty() { "" } else { "; " };
                    why = format!("{why}{between}{endpoint}: {error}");
                }
            }
        }
        Err(ArbiterError::Unreachable(why))
    }

    fn post_authorized(&self, endpoint: &str, path: &str, body: &Value) -> Result<Value, String> {
        let path = format!("kv/{path}");
        let Some(login) = &self.login else { return self.post_to(endpoint, &path, body, None) };
        let kept = login.token().clone();
        if let Some(token) = &kept {
            match self.post_to(endpoint, &path, body, Some(token)) {
                // Tokens expire. A refused request was not executed.
                Err(error) if error.contains("auth") => {}
                answer => return answer,
            }
        }
        let who = json!({ "name": login.name, "password": login.password });
        let answer = self.post_to(endpoint, "auth/authenticate", &who, None);
        let answer = answer.map_err(|error| format!("as user {}: {error}", login.name))?;
        let token = answer["token"].as_str().ok_or("etcd gave no token")?;
        *login.token() = Some(token.to_owned());
        self.post_to(endpoint, &path, body, Some(token))
    }

    /// Sends one request with `body`. An error is the reason why there is no answer.
    fn post_to(
        &self,
        endpoint: &str,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<Value, String> {
        let body = body.to_string();
        let mut request = self.agent.post(format!("{endpoint}/v3/{path}")).content_type("application/json");
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let mut response = request.send(&body).map_err(|error| error.to_string())?;
        let status = response.status();
        let bytes = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
        let bytes = bytes.map_err(|error| error.to_string())?;
        answer::read(&status.to_string(), status.is_success(), &bytes)
    }

    /// Executes `then` if `compare` holds, and otherwise reads the key. Returns what was read;
    /// `None` if the comparison held. The second value is true if the request may have been
    /// executed before.
    fn decide(
        &self,
        migration: MigrationId,
        compare: Value,
        then: Value,
    ) -> Result<(Option<Result<Ownership, ArbiterError>>, bool), ArbiterError> {
        let read = json!({ "request_range": { "key": BASE64.encode(self.key(migration)) } });
        let body = json!({ "compare": [compare], "success": [then], "failure": [read] });
        let (answer, repeated) = self.post_repeatedly("txn", &body)?;
        let read = answer::refused(&answer).map(|range| answer::held(&self.register(migration), range));
        Ok((read, repeated))
    }

    fn put_request(&self, migration: MigrationId, value: &str) -> Value {
        json!({ "request_put": { "key": BASE64.encode(self.key(migration)), "value": BASE64.encode(value) } })
    }

    fn value_condition(&self, migration: MigrationId, value: &str) -> Value {
        let (key, value) = (BASE64.encode(self.key(migration)), BASE64.encode(value));
        json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": value })
    }

    /// Returns a comparison of the key's creation: `EQUAL` holds if it does not exist, `GREATER` if
    /// it does.
    fn creation_condition(&self, migration: MigrationId, result: &str) -> Value {
        let key = BASE64.encode(self.key(migration));
        json!({ "key": key, "target": "CREATE", "result": result, "create_revision": "0" })
    }
}

impl Login {
    fn token(&self) -> MutexGuard<'_, Option<String>> {
        // The token is valid whether or not another thread panicked.
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arbiter for Etcd {
    fn name(&self) -> String {
        format!("etcd {}", self.prefix)
    }

    fn register(&self, migration: MigrationId) -> String {
        format!("key {} in etcd", self.key(migration))
    }

    fn open(&self, migration: MigrationId) -> Result<(), ArbiterError> {
        match self.decide(
            migration,
            self.creation_condition(migration, "EQUAL"),
            self.put_request(migration, OPEN),
        )? {
            (None, _) => Ok(()),
            // A member has created the key, and its answer was lost.
            (Some(Ok(Ownership::Open)), true) => Ok(()),
            (Some(_), _) => Err(ArbiterError::NoRegister(format!(
                "{} exists already, and a migration's id is random: another program makes such keys",
                self.register(migration)
            ))),
        }
    }

    fn request(&self, migration: MigrationId, request: ArbiterRequest) -> Result<Ownership, ArbiterError> {
        let (compare, value, owner) = match request {
            ArbiterRequest::Look => {
                let answer = self.post("range", &json!({ "key": BASE64.encode(self.key(migration)) }))?;
                return answer::held(&self.register(migration), &answer);
            }
            ArbiterRequest::Claim(Side::Source) => {
                (self.value_condition(migration, OPEN), SOURCE, Ownership::Source)
            }
            ArbiterRequest::Claim(Side::Target) => {
                (self.value_condition(migration, OPEN), TARGET, Ownership::Target { runs: false })
            }
            ArbiterRequest::Runs => {
                (self.value_condition(migration, TARGET), RUNS, Ownership::Target { runs: true })
            }
            ArbiterRequest::GiveBack => {
                (self.creation_condition(migration, "GREATER"), SOURCE, Ownership::Source)
            }
        };
        match self.decide(migration, compare, self.put_request(migration, value))?.0 {
            None => Ok(owner),
            Some(held) => held,
        }
    }

    fn close(&self, migration: MigrationId) -> Result<(), ArbiterError> {
        self.post("deleterange", &json!({ "key": BASE64.encode(self.key(migration)) })).map(drop)
    }
}

#[cfg(test)]
#[path = "etcd_tests.rs"]
mod tests;
