//! vmferry's side of `vmferry-bench snapshot`.

use super::args::BenchArgs;
use super::{Finished, ended, no_kvm, program};
use crate::snapshot::{self, GuestSpec, Options, OurError, OurRunner, Outcome, Run};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Environment, Role, Setup, SingleProcess};

/// Interval at which the end of the snapshot is awaited. Each request takes processor time from the
/// guest.
const POLL: Duration = Duration::from_millis(100);
/// Time that a guest may take to fill its memory.
const START: Duration = Duration::from_secs(120);
/// Time after the snapshot in which the guest checks pages.
const AFTER: Duration = Duration::from_millis(300);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("snapshot: {what}");
    let Outcome { document, failures } = snapshot::run(&options, &mut Ours, &mut progress);
    let (table, page) = (snapshot::table(&document), snapshot::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &GuestSpec, file: &Path) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        write_once(spec, file).map_err(|error| OurError::Failed(error.into()))
    }
}

/// Options of a process that may write to a folder.
#[derive(Debug)]
struct MayWrite(Vec<OsString>);

impl Environment for MayWrite {
    fn options(&self, _: Role) -> Vec<OsString> {
        self.0.clone()
    }
}

fn write_once(spec: &GuestSpec, file: &Path) -> Result<Run> {
    let folder = file.parent().context("the file has no folder")?;
    let environment = MayWrite(vec!["--migrate-dir".into(), folder.into()]);
    let setup = Setup {
        // QEMU has no balloon in this bench.
        balloon: false,
        environment: &environment,
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload())
    };
    let mut guest = SingleProcess::start(&setup)?;
    guest.runner.wait("the guest filling its memory", START, &AtomicBool::new(false), |status| {
        (status["vm"]["guest"]["state"] == "running").then_some(())
    })?;
    std::thread::sleep(spec.warm_up);
    let mut request = json!({ "uri": format!("file:{}", file.display()) });
    if spec.since {
        let base = file.with_extension("base");
        guest.runner.client.call("snapshot", json!({ "uri": format!("file:{}", base.display()) }))?;
        ended(&mut guest.runner, POLL, |_| Ok(()))?;
        std::thread::sleep(spec.warm_up);
        request["since"] = base.to_str().context("the path of the base is not text")?.into();
    }
    let begin = Instant::now();
    guest.runner.client.call("snapshot", request)?;
    let report = ended(&mut guest.runner, POLL, |_| Ok(()))?;
    let total = begin.elapsed();
    std::thread::sleep(AFTER);
    let later = guest.runner.status()?["vm"]["guest"].clone();
    if later["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the snapshot: {later}");
    }
    let time = |value: &Value| value.as_f64().map(|ms| Duration::from_secs_f64(ms / 1e3));
    let busy = |value: &Value| value.as_f64().filter(|speed| *speed > 0.0);
    Ok(Run {
        pause: time(&report["downtime_ms"]),
        total,
        before: busy(&report["guest"]["before_writes_per_s"]),
        during: busy(&report["guest"]["during_writes_per_s"]),
        stall_max: report["guest"]["stall_max_us"].as_u64().map(Duration::from_micros),
        bytes: report["bytes"]["wire"].as_u64().context("no count of bytes")?,
        waits: report["snapshot"]["waits"].as_u64(),
    })
}
