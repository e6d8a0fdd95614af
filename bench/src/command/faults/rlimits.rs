//! Limits of a process (`setrlimit(2)`).
//!
//! Each operation opens a few descriptors. A limit of the descriptors that is raised step by step
//! makes each of these steps fail once.

use crate::command::side::{PATIENCE, Side};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Number of descriptors with which every operation succeeds.
const ENOUGH: u64 = 128;

/// Returns the numbers of the open descriptors of process `pid`.
fn open(pid: u32) -> Result<BTreeSet<u64>> {
    let mut open = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        open.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
    }
    Ok(open)
}

/// Returns the limit with which a process that has the descriptors `open` can open `more`
/// descriptors.
fn limit_for(open: &BTreeSet<u64>, more: u64) -> u64 {
    let mut free = (0..).filter(|number| !open.contains(number));
    // The kernel gives a new descriptor the lowest free number, which must be below the limit.
    let taken = usize::try_from(more).unwrap_or(usize::MAX);
    free.nth(taken).unwrap_or(u64::MAX)
}

/// Lets the process of `side` open `more` descriptors.
pub(super) fn allow(side: &Side, more: u64) -> Result<()> {
    set(side, Resource::Nofile, Some(limit_for(&open(side.pid())?, more)))
}

/// Sets the soft limit of the process of `side`. `None` stands for the hard limit.
pub(super) fn set(side: &Side, resource: Resource, limit: Option<u64>) -> Result<()> {
    let pid = i32::try_from(side.pid()).ok().and_then(Pid::from_raw).context("no process")?;
    // The process has inherited the hard limit of this one.
    let maximum = getrlimit(resource).maximum;
    prlimit(Some(pid), resource, Rlimit { current: limit.or(maximum), maximum })?;
    Ok(())
}

/// Returns the number of descriptors of process `pid`, without those that it keeps for the next
/// snapshot.
fn count(pid: u32) -> Result<usize> {
    let kept = ["anon_inode:[userfaultfd]", "anon_inode:[eventfd]"];
    let is_kept = |number: &u64| {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{number}"));
        link.is_ok_and(|to| kept.iter().any(|kept| to.as_os_str() == *kept))
    };
    Ok(open(pid)?.iter().filter(|number| !is_kept(number)).count())
}

/// Waits until the process of `side` has no more descriptors than `before`. The process closes the
/// connection of a client a moment after the client has ended.
fn not_more_than(side: &Side, before: usize) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = count(side.pid())?;
        if now <= before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the process had {before} descriptors, and has {now}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Tries an operation of the process of `side`, or of a command, with 1, 2, 3 and more descriptors
/// until it succeeds. `once` gets the number, and returns whether the operation has succeeded.
///
/// Without a single descriptor, the process cannot accept the connection of the command. After each
/// failure, the process must have as many descriptors as before.
pub(super) fn until_enough(
    side: &mut Side,
    mut once: impl FnMut(&mut Side, u64) -> Result<bool>,
) -> Result<u64> {
    let before = count(side.pid())?;
    for number in 1..ENOUGH {
        if once(side, number).with_context(|| format!("with {number} descriptors"))? {
            return Ok(number);
        }
        side.goes_on().with_context(|| format!("after a failure with {number} descriptors"))?;
        not_more_than(side, before).with_context(|| format!("after a failure with {number} descriptors"))?;
    }
    bail!("the operation does not succeed with {ENOUGH} descriptors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_leaves_the_wanted_number_of_descriptors() {
        let open = BTreeSet::from([0, 1, 2, 4, 9]);
        // 3 is free, then 5.
        assert_eq!([0, 1, 2, 5].map(|more| limit_for(&open, more)), [3, 5, 6, 10]);
    }
}
