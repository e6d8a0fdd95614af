//! `vmferry demo`: a complete migration on one host, with real processes and the commands that
//! operators use.

use crate::api::{Client, MigrateRequest};
use crate::args::{DemoArgs, GuestKind, TrackerArg};
use crate::choices::OnTimeoutArg;
use crate::output::INDENT;
use crate::speed::{EVERY, Sample};
use crate::{Status, guest, migrate, output, speed};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_client::{Pair, Runner, Setup};
use vmferry_guest_abi::Workload;

/// Longest time that the guest may take to continue at the target.
const START: Duration = Duration::from_secs(60);
/// Time for which the guest is watched before and after the migration.
const WATCH: Duration = Duration::from_millis(1200);
/// Longest time that the guest may take to check all its pages.
const CHECK: Duration = Duration::from_secs(60);

/// Entries of a dirty ring if the operator gives no number.
const DEFAULT_RING: u32 = 4096;

/// Returns the kind of guest: the given one, or KVM where it works.
fn kind(asked: Option<GuestKind>) -> GuestKind {
    asked.unwrap_or_else(|| match guest::no_kvm() {
        None => GuestKind::Kvm,
        Some(why) => {
            output::print_message(&format!(
                "KVM cannot be used on this host ({why}). The demo moves a process guest instead, with the same engine"
            ));
            GuestKind::Process
        }
    })
}

pub(crate) fn demo(args: &DemoArgs) -> Result<Status> {
    let stop = Arc::new(AtomicBool::new(false));
    let on_signal = Arc::clone(&stop);
    ctrlc::set_handler(move || on_signal.store(true, Ordering::Release)).context("cannot catch Ctrl-C")?;
    let json_out = args.json.as_deref().map(output::open).transpose()?;
    let quiet = args.json.as_deref() == Some(Path::new("-"));
    // On a terminal, lines are broken between words, and continue at column `indent`.
    let print_line = |text: &str, indent: usize| {
        let columns = output::columns(quiet);
        let text = columns.map_or_else(|| text.to_owned(), |columns| output::fold(text, columns, indent));
        if quiet { eprintln!("{text}") } else { println!("{text}") }
    };
    let workload = fitting(&args.workload, args.memory);
    let program = std::env::current_exe().context("cannot find this executable")?;
    let guest = kind(args.guest).to_string();
    let setup = Setup {
        guest: &guest,
        cpus: args.cpus,
        // A guest has dirty rings from its start or never.
        dirty_ring: (args.tracker == TrackerArg::Ring).then_some(DEFAULT_RING),
        sandbox: args.sandbox.name(),
        ..Setup::new(&program, args.memory, workload.to_string())
    };
    print_line(&introduction(&setup), 0);
    let mut pair = Pair::start(&setup, &stop)?;
    std::thread::sleep(WATCH);
    let before = pair.source.status()?["vm"]["guest"].clone();
    print_line(&format!("source       process {}: {}", pair.source.pid(), describe(&before)), INDENT);
    print_line(&format!("target       process {} waits at {}", pair.target.pid(), pair.uri), INDENT);
    let began = Instant::now();
    pair.migrate(&request(args, &pair.uri))?;
    let (source, target) = (&mut pair.source.client, &mut pair.target.client);
    let mut looks = Vec::new();
    // In postcopy the guest runs at the target while its pages arrive.
    let mut on_status = |status: &Value| {
        let at_target = status["state"].as_str().is_some_and(|state| state.starts_with("postcopy"));
        if at_target && looks.last().is_none_or(|(at, _): &(Instant, Sample)| at.elapsed() >= EVERY) {
            looks.extend(read_sample(target).ok());
        }
    };
    let mut report = migrate::watch(source, args.link, &stop, &mut on_status);
    let status = if report["outcome"] == "completed" {
        let (after, later) = follow(&mut pair.target, &before, &stop)?;
        looks.extend(later);
        if let Some(points) = report["guest"]["speed"]["points"].as_array_mut() {
            points.extend(speed::points(began, &looks).into_iter().map(|point| json!(point)));
        }
        report["guest"]["after_writes_per_s"] = after["writes_per_s"].clone();
        report["guest"]["stall_max_us"] = after["stall_max_us"].clone();
        report["guest"]["checked_itself"] = json!(true);
        output::print(&report, quiet)?;
        print_line(&format!("target       process {}: {}", pair.target.pid(), describe(&after)), INDENT);
        print_line("The guest checked all its pages at the target: none is missing, stale or corrupt.", 0);
        Status::Done
    } else {
        output::print(&report, quiet)?;
        output::exit_status(&report)
    };
    if let Some(mut out) = json_out {
        use std::io::Write;
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    }
    Ok(status)
}

fn introduction(setup: &Setup<'_>) -> String {
    format!(
        "A {} guest with {} MiB and {} vCPU{} runs `{}`. It moves to another process while it works.",
        setup.guest,
        setup.memory >> 20,
        setup.cpus,
        if setup.cpus == 1 { "" } else { "s" },
        setup.workload
    )
}

/// Watches the guest after its migration: its write count must rise, and all its pages must be
/// intact.
///
/// Returns the guest's last status, and samples of its write count.
fn follow(target: &mut Runner, before: &Value, stop: &AtomicBool) -> Result<(Value, Vec<(Instant, Sample)>)> {
    const REQUEST: u64 = 1;
    target.client.call("verify-guest", json!({ "request": REQUEST }))?;
    let had = before["t_us"].as_u64().unwrap_or(0);
    target.wait("the guest running at the target", START, stop, |status| {
        (status["vm"]["guest"]["t_us"].as_u64()? > had).then_some(())
    })?;
    let looks = watch_speed(&mut target.client)?;
    let after = target.wait("the guest checking all its pages", CHECK, stop, |status| {
        let guest = &status["vm"]["guest"];
        (guest["verify_done"].as_u64()? == REQUEST || guest["corrupt"].as_u64()? > 0).then(|| guest.clone())
    })?;
    if after["corrupt"].as_u64() != Some(0) {
        bail!(
            "the guest found {} corrupt pages after the migration; the first: {}",
            after["corrupt"],
            after["first_corrupt"]
        );
    }
    Ok((after, looks))
}

/// Samples the guest's write count for [`WATCH`].
fn watch_speed(client: &mut Client) -> Result<Vec<(Instant, Sample)>> {
    let until = Instant::now() + WATCH;
    let mut looks = Vec::new();
    while Instant::now() < until {
        looks.push(read_sample(client)?);
        std::thread::sleep(EVERY);
    }
    Ok(looks)
}

/// Returns a sample of the guest's clock and write count.
fn read_sample(client: &mut Client) -> Result<(Instant, Sample)> {
    let vcpus = client.call("writes", json!({}))?;
    let of = |cpu: &Value, index: usize| cpu[index].as_u64().unwrap_or(0);
    let cpus = || vcpus["vcpus"].as_array().into_iter().flatten();
    let t_us = cpus().map(|cpu| of(cpu, 0)).max().unwrap_or(0);
    Ok((Instant::now(), Sample { t_us, writes: cpus().map(|cpu| of(cpu, 1)).sum() }))
}

/// Returns the workload, reduced to fit into a small guest.
fn fitting(workload: &Workload, memory: u64) -> Workload {
    let mut workload = *workload;
    let most = memory / 4 * 3;
    let cut = |size: Option<u64>| size.map(|size| size.min(most));
    (workload.ws, workload.data) = (cut(workload.ws), cut(workload.data));
    workload
}

fn request(args: &DemoArgs, uri: &str) -> MigrateRequest {
    MigrateRequest {
        mode: args.mode,
        tracker: migrate::tracker(args.tracker),
        channels: args.channels,
        max_bandwidth: args.link,
        // A guest that dirties faster than the link carries must not prolong the demonstration for
        // ever.
        timeout_ms: Some(20_000),
        on_timeout: OnTimeoutArg::Switch,
        free_pages: args.free_pages.into(),
        verify: true,
        ..MigrateRequest::to(uri)
    }
}

fn describe(guest: &Value) -> String {
    format!(
        "{:.0} writes/s, {} writes and {} checks so far, {} wrong",
        guest["writes_per_s"].as_f64().unwrap_or(0.0),
        guest["writes"],
        guest["checks"],
        guest["corrupt"]
    )
}
