//! vmferry's side of `vmferry-bench codec`: a guest that moves with encoded pages.

use super::args::BenchArgs;
use super::postcopy::{Stalls, result};
use super::request::MigrateRequest;
use super::{Finished, ended, meters, no_kvm, program, quietly};
use crate::codec::{
    self, CACHE, CaseSpec, Encoding, OBSERVE, Options, OurError, OurRunner, Outcome, Return, ReturnSide,
    ReturnSpec, Run,
};
use crate::link::Link;
use crate::result::MigrationResult;
use crate::stalls::{POLL, on_target};
use crate::warm::Warm;
use anyhow::{Context, Result};
use serde_json::Value;
use std::ffi::OsString;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use vmferry_client::{Environment, Pair, Role, Setup, SingleProcess};

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.moves.repeats = args.rounds.map_or(options.moves.repeats, usize::from);
    options.seed = args.seed;
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("codec: {what}");
    let Outcome { document, failures } = codec::run(&options, &mut Ours, &mut progress);
    let (table, page) = (codec::table(&document), codec::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(
        &mut self,
        spec: &CaseSpec,
        encoding: Encoding,
        link: &Link,
        initrd: Option<&Path>,
    ) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        let source = initrd.map(|path| option("--initrd", path)).unwrap_or_default();
        move_once(spec, encoding, &WithOptions { link, source, target: Vec::new() })
            .map_err(|error| OurError::Failed(error.into()))
    }

    fn go_back(&mut self, spec: &ReturnSpec, side: ReturnSide, link: &Link) -> Result<Return, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        move_back(spec, side, link).map_err(|error| OurError::Failed(error.into()))
    }
}

/// Link whose two processes have further options.
#[derive(Debug)]
struct WithOptions<'a> {
    link: &'a Link,
    source: Vec<OsString>,
    target: Vec<OsString>,
}

impl Environment for WithOptions<'_> {
    fn address(&self, role: Role) -> Ipv4Addr {
        Environment::address(self.link, role)
    }

    fn options(&self, role: Role) -> Vec<OsString> {
        match role {
            Role::Source => self.source.clone(),
            Role::Target => self.target.clone(),
        }
    }

    fn enter(&self, role: Role, command: &mut Command) -> io::Result<()> {
        Environment::enter(self.link, role, command)
    }
}

/// Returns an option with a path.
fn option(name: &str, path: &Path) -> Vec<OsString> {
    vec![name.into(), path.into()]
}

fn move_once(spec: &CaseSpec, encoding: Encoding, host: &WithOptions<'_>) -> Result<Run> {
    let setup = Setup {
        // QEMU has no balloon in this bench.
        balloon: false,
        environment: host,
        ..Setup::new(program::vmferry()?, spec.memory(), spec.workload())
    };
    let mut pair = Pair::start(&setup, &AtomicBool::new(false))?;
    let request = request(spec, encoding, &pair.uri)?;
    let mut here = Stalls::before(&mut pair.source, spec.memory(), (spec.warm_up, POLL))?;
    let meters = meters(&pair)?;
    let start = Instant::now();
    here.count_from(start);
    pair.migrate(&request)?;
    let mut looked = start;
    let report = ended(&mut pair.source, POLL, |source| {
        if looked.elapsed() < OBSERVE {
            return Ok(());
        }
        looked = Instant::now();
        here.listen(source).map(drop)
    })?;
    let end = start.elapsed().as_secs_f64();
    let (cpu_source, cpu_destination) = (meters[0].used()?, meters[1].used()?);
    // The stopped guest is still in the memory of the source.
    here.listen(&mut pair.source)?;
    let mut there = Stalls::since(start);
    let look = || Ok::<_, anyhow::Error>(there.listen(&mut pair.target)?.cloned());
    let target = on_target(here.observed.last(), look)?;
    let passes = report["passes"].as_array().map(|passes| passes.len() as u64);
    let pages = |codec: &str| report["codecs"][codec]["pages"].as_u64();
    let compressed =
        |of: &Value| of.is_object().then(|| pages("lz4").unwrap_or(0) + pages("zstd").unwrap_or(0));
    Ok(Run {
        source: here.observed,
        target: target.context("the guest did not report from the target within 10 s")?,
        switched: end,
        end,
        result: MigrationResult {
            cpu_source,
            cpu_destination,
            passes,
            delta_pages: pages("delta"),
            compressed_pages: compressed(&report["codecs"]),
            ..result(&report)?
        },
        ..Run::default()
    })
}

/// Returns the request to migrate the guest of `spec` by precopy, with this encoding.
fn request(spec: &CaseSpec, encoding: Encoding, uri: &str) -> Result<MigrateRequest> {
    Ok(MigrateRequest {
        codec: encoding.codec(),
        delta: encoding.delta(),
        delta_cache: Some(CACHE).filter(|_| encoding.delta() != "off"),
        downtime_limit_ms: u64::try_from(spec.downtime_limit.as_millis())?,
        timeout_ms: Some(u64::try_from(spec.limit.as_millis())?),
        on_timeout: "switch",
        // The shaped link is not loopback, and the bench does not measure encryption.
        insecure: true,
        ..MigrateRequest::to(uri)
    })
}

fn move_back(spec: &ReturnSpec, side: ReturnSide, link: &Link) -> Result<Return> {
    let folder = tempfile::tempdir()?;
    let snapshot = folder.path().join("snapshot");
    let target = match side {
        ReturnSide::Whole => Vec::new(),
        ReturnSide::Known => option("--have", &snapshot),
    };
    let host = WithOptions { link, source: option("--migrate-dir", folder.path()), target };
    let setup = Setup {
        balloon: false,
        environment: &host,
        ..Setup::new(program::vmferry()?, spec.memory(), spec.workload())
    };
    let stop = AtomicBool::new(false);
    let mut source = SingleProcess::start(&setup)?;
    source.runs(&stop)?;
    let copy =
        MigrateRequest { keep_running: true, ..MigrateRequest::to(&format!("file:{}", snapshot.display())) };
    source.migrate(&copy)?;
    quietly(&mut source.runner).context("the snapshot")?;
    let mut pair = source.with_target(&setup, &stop)?;
    let warm = Warm::hold(spec.memory());
    std::thread::sleep(spec.settle());
    let meters = meters(&pair)?;
    drop(warm);
    pair.migrate(&MigrateRequest { insecure: true, ..MigrateRequest::to(&pair.uri) })?;
    let report = quietly(&mut pair.source)?;
    let known = &report["known_pages"];
    let result = MigrationResult {
        cpu_source: meters[0].used()?,
        cpu_destination: meters[1].used()?,
        passes: report["passes"].as_array().map(|passes| passes.len() as u64),
        ..result(&report)?
    };
    Ok(Return { result, known: known["hashes"].as_u64().zip(known["known"].as_u64()) })
}
