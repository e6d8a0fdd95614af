//! Register of the source at its arbiter, over real sockets.

use crate::rig::{quick, unix_uri};
use crate::toy::{Options, Toy};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use vmferry_engine::arbiter::{Arbiter, ArbiterError, ArbiterRequest, MigrationId, Ownership};
use vmferry_engine::{MigrateError, MigrationHandle, Settings, Uri, migrate};
use vmferry_testkit::temp_path;

/// Arbiter that records its requests.
#[derive(Debug, Default)]
struct Noting {
    asked: Mutex<Vec<&'static str>>,
    /// Listener of the target, if there is one.
    target: Option<UnixListener>,
}

impl Noting {
    fn note(&self, what: &'static str) {
        self.asked.lock().unwrap().push(what);
    }
}

impl Arbiter for Noting {
    fn name(&self) -> String {
        "noting".into()
    }

    fn register(&self, migration: MigrationId) -> String {
        migration.to_string()
    }

    fn open(&self, _: MigrationId) -> Result<(), ArbiterError> {
        // No connection waits in the queue of a listener, because the source has not connected.
        let early = self.target.as_ref().is_some_and(|target| target.accept().is_ok());
        self.note(if early { "open, behind a connection" } else { "open" });
        // The error ends the migration, because later steps are not part of these tests.
        match &self.target {
            Some(_) => Err(ArbiterError::Unreachable("no answer".into())),
            None => Ok(()),
        }
    }

    fn request(&self, _: MigrationId, _: ArbiterRequest) -> Result<Ownership, ArbiterError> {
        self.note("say");
        Ok(Ownership::Open)
    }

    fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
        self.note("close");
        Ok(())
    }
}

/// Tries to migrate to `uri`, which fails. Returns the error and the requests to the arbiter.
fn refused(uri: &Uri, arbiter: Noting) -> (MigrateError, Vec<&'static str>) {
    let mut source = Toy::new(Options::default(), true);
    let arbiter = Arc::new(arbiter);
    let settings = Settings { arbiter: Some(Arc::clone(&arbiter) as Arc<dyn Arbiter>), ..quick() };
    let error = migrate(&mut source, uri, None, &settings, &MigrationHandle::new()).unwrap_err();
    assert!(source.works(), "the guest stands still");
    let asked = std::mem::take(&mut *arbiter.asked.lock().unwrap());
    (error, asked)
}

/// The target's time limit for the announcement of a guest begins with the hello, and an arbiter
/// may take longer.
#[test]
fn source_opens_its_register_before_it_connects() {
    let path = temp_path("fenced");
    let target = UnixListener::bind(&path).unwrap();
    target.set_nonblocking(true).unwrap();
    let arbiter = Noting { target: Some(target), ..Noting::default() };
    let (error, asked) = refused(&Uri::Unix(path.clone()), arbiter);
    std::fs::remove_file(path).unwrap();
    assert!(matches!(error, MigrateError::Arbiter(_)), "{error}");
    assert_eq!(asked, ["open"]);
}

#[test]
fn source_that_reaches_no_target_removes_its_register() {
    let (error, asked) = refused(&unix_uri(), Noting::default());
    assert!(matches!(error, MigrateError::Connect { .. }), "{error}");
    assert_eq!(asked, ["open", "close"]);
}
