//! Run of the scenarios one after the other, each in a separate process.
//!
//! A process can be killed when its time is up, whatever its threads wait for. The processes that
//! it started end with it (`vmferry run --die-with-parent`, and its process group).

use crate::emulator::Watch;
use crate::pace::{self, Limit};
use crate::plan::Plan;
use crate::record::{CURRENT, Outcome, PACE, Record};
use crate::scenarios::{self, Lab, Scenario, Verdict};
use crate::violation;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Interval at which a scenario's process is polled.
const TICK: Duration = Duration::from_millis(50);
/// File in a scenario's folder with its record.
const RECORD: &str = "record.json";
/// File in a scenario's folder with the last exits of its guests, if the scenario failed.
const EXITS: &str = "exits.txt";
/// File in a scenario's folder with its output.
const LOG: &str = "log.txt";

/// Runs the scenarios of the plan in the file `path`, up to the first one whose guest the emulator
/// lost.
///
/// # Errors
///
/// Fails if results cannot be written. A scenario that fails is not an error: its record has the
/// failure.
pub fn run(path: &Path) -> Result<()> {
    let plan = Plan::read(path)?;
    let start = Instant::now();
    // Without the watch, a guest that the emulator lost would count as lost by vmferry.
    let watch = plan.emulated.then(Watch::start).transpose().unwrap_or_else(|error| {
        println!("LAB cannot watch the emulator: {error:#}");
        None
    });
    for name in &plan.scenarios {
        let pace = pace::calibrate();
        std::fs::write(plan.results.join(PACE), pace.to_string())?;
        std::fs::write(plan.results.join(CURRENT), name)?;
        let began = Instant::now();
        println!("LAB {:7.1} begin {name} (pace {pace:.1})", start.elapsed().as_secs_f64());
        let mut record = match scenarios::find(name) {
            None => Record::new(name, Outcome::Failed, Some("there is no such scenario".into()), 0.0),
            Some(scenario) => watched(scenario, path, &plan, watch.as_ref())?,
        };
        record.seconds = began.elapsed().as_secs_f64();
        if plan.emulated {
            record.figures.insert("pace".into(), pace.into());
        }
        record.append(&plan.results)?;
        let why = record.why.as_deref().map_or_else(String::new, |why| format!(": {why}"));
        println!(
            "LAB {:7.1} {} {name} ({:.1} s){why}",
            start.elapsed().as_secs_f64(),
            record.outcome.word(),
            record.seconds
        );
        if record.outcome == Outcome::Emulator {
            // A new machine continues with this scenario.
            break;
        }
    }
    std::fs::write(plan.results.join(CURRENT), "")?;
    Ok(())
}

/// Runs one scenario. After a failure, stores the last exits and decides whether they prove that
/// the emulator lost the guest.
fn watched(scenario: &Scenario, path: &Path, plan: &Plan, watch: Option<&Watch>) -> Result<Record> {
    let record = one(scenario, path, plan)?;
    let Some(watch) = watch else { return Ok(record) };
    let (last, lost) = (watch.last()?, watch.lost()?);
    if let Some(lost) = &lost {
        println!("LAB the emulator lost a guest of {}: {lost}", scenario.name);
    }
    if record.outcome != Outcome::Failed {
        return Ok(record);
    }
    std::fs::write(plan.folder(scenario.name).join(EXITS), last)?;
    Ok(match lost {
        Some(lost) => Record {
            outcome: Outcome::Emulator,
            why: Some(format!("a guest at the outer kernel's own instructions: {lost}")),
            ..record
        },
        None => record,
    })
}

/// Runs one scenario in a separate process.
fn one(scenario: &Scenario, path: &Path, plan: &Plan) -> Result<Record> {
    let name = scenario.name;
    let folder = plan.folder(name);
    std::fs::create_dir_all(&folder)?;
    let log = File::create(folder.join(LOG))?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["scenario", name])
        .arg(path)
        .arg(pace::current().to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start a process for a scenario")?;
    let limit = Limit::new(scenario.limit);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if limit.is_over() {
            break None;
        }
        std::thread::sleep(TICK);
    };
    // Kills the processes that the scenario left behind. The group does not exist if there are
    // none.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let Some(status) = status else {
        child.wait()?;
        let why = format!("not done after {}; see {name}/{LOG}", limit.words());
        return Ok(Record::new(name, Outcome::Failed, Some(why), 0.0));
    };
    let record =
        match std::fs::read(folder.join(RECORD)).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
            Some(record) => record,
            None => {
                let why = format!("its process ended without a record ({status}); see {name}/{LOG}");
                Record::new(name, Outcome::Failed, Some(why), 0.0)
            }
        };
    Ok(match violation::found(&folder)? {
        Some(line) => Record { outcome: Outcome::Failed, why: Some(line), ..record },
        None => record,
    })
}

/// Runs one scenario in this process, at the pace that the agent measured, and stores its record in
/// its folder.
///
/// # Errors
///
/// Fails if there is no such scenario or its record cannot be written.
pub fn scenario(name: &str, path: &Path, pace: f64) -> Result<()> {
    pace::keep(pace);
    // This process ends with the agent, and the processes that it starts end with this one.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let plan = Plan::read(path)?;
    let scenario = scenarios::find(name).with_context(|| format!("there is no scenario '{name}'"))?;
    let folder = plan.folder(name);
    std::fs::create_dir_all(&folder)?;
    let mut lab = Lab::new(plan, folder.clone());
    let verdict = (scenario.run)(&mut lab);
    let (outcome, why) = match verdict {
        Ok(Verdict::Passed) => (Outcome::Passed, None),
        Ok(Verdict::Skipped(why)) => (Outcome::Skipped, Some(why)),
        Err(error) => (Outcome::Failed, Some(format!("{error:#}"))),
    };
    println!("{}{}", outcome.word(), why.as_deref().map_or_else(String::new, |why| format!(": {why}")));
    let figures = std::mem::take(&mut lab.figures).into_iter().collect::<BTreeMap<_, _>>();
    let record = Record { figures, ..Record::new(name, outcome, why, 0.0) };
    std::fs::write(folder.join(RECORD), serde_json::to_vec(&record)?)?;
    Ok(())
}
