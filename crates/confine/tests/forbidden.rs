//! Tries the actions of an intruder in a process that is confined exactly as a VMM is, thread by
//! thread. None of them may work, and each thread must still do its own work.
//!
//! Each attempt runs in a process of its own (this program again), because most attempts end the
//! process in one of the two modes.

#[path = "forbidden/attempts.rs"]
mod attempts;

use attempts::{ATTEMPTS, Attempt};
use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use vmferry_confine::{Confinement, File, InForce, Mode, Plan, Use};
use vmferry_testkit::{Need, skip};
use vmferry_thread::Role;

/// Environment variable with the task of a child process: a role, an attempt, and a mode.
const CHILD: &str = "VMFERRY_CONFINE_CHILD";
/// User that owns nothing.
const UNPRIVILEGED: u32 = 65_534;

fn main() -> ExitCode {
    if let Ok(task) = std::env::var(CHILD) {
        return child(&task);
    }
    let cases: Vec<Case> = users().into_iter().flat_map(cases).collect();
    let ran = cases.len();
    let outcomes = all(cases);
    for (what, why) in outcomes.iter().filter_map(|(what, end)| Some((what, end.as_ref().err()?))) {
        println!("FAILED: {what}: {why}");
    }
    // Each missing feature of the host is reported once, although several attempts need it.
    let missing: BTreeSet<_> = outcomes.iter().filter_map(|(_, end)| end.as_ref().ok()?.as_ref()).collect();
    for (user, why) in missing {
        let need = match user {
            Some(_) => Need::Root,
            None if why.contains("/dev/kvm") => Need::Kvm,
            None => Need::Kernel,
        };
        skip(need, format!("as {user:?}: {why}"));
    }
    let failed = outcomes.iter().filter(|(_, end)| end.is_err()).count();
    println!("{ran} attempts, {failed} with another outcome than is wanted");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Outcome of an attempt; `Some` with the user and the reason if the attempt is not possible on
/// this host.
type End = Result<Option<(Option<u32>, String)>, String>;

/// An attempt: its description and the function that runs it.
type Case = (String, Box<dyn FnOnce() -> End + Send>);

fn cases(user: Option<u32>) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    // For another user, the mode that ends the process is enough.
    let modes: &[Mode] = if user.is_none() { &[Mode::Kill, Mode::On] } else { &[Mode::Kill] };
    for attempt in ATTEMPTS {
        for role in Role::ALL {
            for mode in modes.iter().copied() {
                let what = format!("{} by {role} as {user:?}, {mode:?}", attempt.name);
                cases.push((what, Box::new(move || check(role, attempt, mode, user))));
            }
        }
    }
    for (name, test) in
        [("a panic", panics as fn(_) -> _), ("log", logs), ("off", off), ("the vCPU's own", runs_a_vcpu)]
    {
        cases.push((format!("{name} as {user:?}"), Box::new(move || test(user))));
    }
    cases
}

/// Runs all cases, as many at a time as there are processors.
fn all(cases: Vec<Case>) -> Vec<(String, End)> {
    let (cases, outcomes) = (Mutex::new(cases.into_iter()), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((what, attempt)) = { cases.lock().unwrap().next() } {
                    let end = attempt();
                    outcomes.lock().unwrap().push((what, end));
                }
            });
        }
    });
    outcomes.into_inner().unwrap()
}

/// Returns the users to run as: this user, and another user if this user is root.
fn users() -> Vec<Option<u32>> {
    if !rustix::process::geteuid().is_root() {
        skip(Need::Root, "as another user: this is not root");
        return vec![None];
    }
    match run(Role::Watch, "nothing", Mode::On, Some(UNPRIVILEGED)) {
        Ok(output) if output.status.success() => vec![None, Some(UNPRIVILEGED)],
        other => {
            skip(Need::Root, format!("as another user: {UNPRIVILEGED} cannot start this program: {other:?}"));
            vec![None]
        }
    }
}

fn run(role: Role, attempt: &str, mode: Mode, user: Option<u32>) -> std::io::Result<Output> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(CHILD, format!("{role} {attempt} {mode:?}")).env("RUST_BACKTRACE", "1");
    command.stdin(Stdio::null()).current_dir("/");
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    command.output()
}

/// Checks that the attempt has the outcome that the role and the mode demand.
fn check(role: Role, attempt: &Attempt, mode: Mode, user: Option<u32>) -> End {
    let output = run(role, attempt.name, mode, user).map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if said.contains("not tried") {
        return Ok(Some((user, said.trim().to_owned())));
    }
    let killed = output.status.signal() == Some(libc::SIGSYS);
    let told = text.contains("which its confinement forbids");
    let works = (attempt.works)(role);
    let fine = if told {
        // The report names the role of the thread.
        !works && text.contains(&format!("({role})")) && killed == (mode == Mode::Kill)
    } else {
        output.status.success() && said.contains(if works { "it worked" } else { "it failed" })
    };
    if fine {
        Ok(None)
    } else {
        Err(format!(
            "it {} work: {:?} {said} {text}",
            if works { "should" } else { "should not" },
            output.status
        ))
    }
}

fn panics(user: Option<u32>) -> End {
    for role in Role::ALL {
        let output = run(role, "panic", Mode::On, user).map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stderr);
        if output.status.code() != Some(0) || !text.contains("panicked at") || !text.contains("out of luck") {
            return Err(format!("{role}: {:?}: {text}", output.status));
        }
    }
    Ok(None)
}

fn logs(user: Option<u32>) -> End {
    works("kill", Mode::Log, user)?;
    // Only a user with a capability can make such a socket. The mode takes none away.
    let outcome = |mode| {
        let output = run(Role::Watch, "raw socket", mode, user).map_err(|error| error.to_string())?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (logged, unconfined) = (outcome(Mode::Log)?, outcome(Mode::Off)?);
    if logged == unconfined { Ok(None) } else { Err(format!("{logged} instead of {unconfined}")) }
}

fn off(user: Option<u32>) -> End {
    works("kill", Mode::Off, user)
}

fn works(attempt: &str, mode: Mode, user: Option<u32>) -> End {
    let output = run(Role::Vcpu, attempt, mode, user).map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // The processes of root cannot be signalled by other users, with or without confinement.
    if said.contains("it worked") || user.is_some() && said.contains("it failed: Operation not permitted") {
        return Ok(None);
    }
    Err(format!("{output:?}"))
}

fn runs_a_vcpu(user: Option<u32>) -> End {
    let output = run(Role::Vcpu, "run a vCPU", Mode::On, user).map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if said.contains("not tried") {
        return Ok(Some((user, said.trim().to_owned())));
    }
    if said.contains("it worked") { Ok(None) } else { Err(format!("{output:?}")) }
}

/// Confines this process, and makes the attempt on a thread of the role.
fn child(task: &str) -> ExitCode {
    let mut words = task.splitn(2, ' ');
    let role = words.next().and_then(|name| Role::ALL.into_iter().find(|role| role.name() == name));
    let (Some(role), Some((name, mode))) = (role, words.next().and_then(|rest| rest.rsplit_once(' '))) else {
        return ExitCode::FAILURE;
    };
    let mode = match mode {
        "On" => Mode::On,
        "Kill" => Mode::Kill,
        "Log" => Mode::Log,
        _ => Mode::Off,
    };
    let mut plan = Plan::new(mode);
    plan.files = vec![
        File::new("/proc", Use::Read),
        File::new("/dev/kvm", Use::Device),
        File::new("/dev/userfaultfd", Use::Device),
    ];
    let Ok(mut confinement) = Confinement::begin(&plan) else { return ExitCode::FAILURE };
    let prepared = attempts::prepare(name);
    let name = name_of(name);
    // As in a VMM: some threads start before the owner has settled, and a migration starts the
    // others later.
    let early = matches!(
        role,
        Role::Vcpu | Role::Network | Role::Device | Role::Api | Role::Metrics | Role::Traces | Role::Watch
    );
    let (go, wait) = std::sync::mpsc::channel::<InForce>();
    let work = move || {
        if let Ok(in_force) = wait.recv() {
            attempts::attempt(name, role, prepared, &in_force);
        }
    };
    let start = |work| vmferry_thread::spawn(role, format!("{role} 0"), work);
    let mut work = Some(work);
    let mut thread = work.take_if(|_| early).map(start);
    if let Err(error) = confinement.complete() {
        let _ = writeln!(std::io::stdout(), "{error}");
        return ExitCode::FAILURE;
    }
    let _ = go.send(confinement.in_force().clone());
    if let Some(work) = work.take_if(|_| role == Role::Owner) {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    }
    thread = thread.or_else(|| work.map(start));
    let _ = thread.transpose().map(|thread| thread.map(std::thread::JoinHandle::join));
    ExitCode::SUCCESS
}

/// Returns the static name of an attempt.
fn name_of(name: &str) -> &'static str {
    let all = ATTEMPTS.iter().map(|attempt| attempt.name).chain(["panic", "run a vCPU"]);
    all.into_iter().find(|known| *known == name).unwrap_or("nothing")
}
