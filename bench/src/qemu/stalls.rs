//! Precopy migrations by QEMU, observed through the guest's statistics page.

use std::time::Instant;

use serde_json::json;

use super::postcopy::{Pair, observation, observations};
use super::{
    ANY_DOWNTIME_MS, MIGRATION_LIMIT, QemuError, QemuSpec, completed, configure, from_info, listen, used,
};
use crate::link::{End, Link};
use crate::result::MigrationResult;
use crate::stalls::{POLL, REPORT, Run, on_target};

/// Boots the guest, lets it run, migrates it once over `link`, and observes its stalls.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure.
pub fn stalls(spec: &QemuSpec, link: &Link) -> Result<Run, QemuError> {
    let mut pair = Pair::start(spec, link)?;
    configure([&mut pair.source.machine, &mut pair.destination.machine], spec)?;
    let uri = listen(&mut pair.destination.machine, link.address(End::Destination))?;
    let mut looks = pair.observe(spec, POLL)?;
    looks.extend(pair.source.look()?);
    let meters = (pair.source.machine.cpu_meter()?, pair.destination.machine.cpu_meter()?);
    let start = Instant::now();
    pair.source.machine.execute("migrate", json!({ "uri": uri }))?;
    let (mut switch_after, mut looked) = (spec.switch_after, start);
    let info = loop {
        std::thread::sleep(POLL);
        if let Some(info) = completed(&mut pair.source.machine, &pair.destination.machine)? {
            break info;
        }
        if start.elapsed() > MIGRATION_LIMIT {
            return Err(pair.source.late("the end of the migration", MIGRATION_LIMIT));
        }
        if switch_after.take_if(|limit| start.elapsed() > *limit).is_some() {
            let any = json!({ "downtime-limit": ANY_DOWNTIME_MS });
            pair.source.machine.execute("migrate-set-parameters", any)?;
        }
        pair.destination.machine.still_runs()?;
        if looked.elapsed() >= spec.observe {
            looked = Instant::now();
            looks.extend(pair.source.look()?);
        }
    };
    let end = start.elapsed().as_secs_f64();
    let (cpu_source, cpu_destination) = (used(&meters.0)?, used(&meters.1)?);
    // The stopped guest is still in the memory of the source.
    looks.extend(pair.source.look()?);
    let source = observations(looks, start);
    // vmferry's source ends by itself. QEMU's source must end in the same time. It may close its
    // connection before it answers.
    let _ = pair.source.machine.execute("quit", json!({}));
    let destination = &mut pair.destination;
    let look = || destination.look().map(|look| look.map(|look| observation(look, start)));
    let Some(target) = on_target(source.last(), look)? else {
        return Err(pair.destination.late("a report of the guest", REPORT));
    };
    pair.quit();
    let result = MigrationResult { cpu_source, cpu_destination, ..from_info(&info)? };
    Ok(Run { source, target, switched: end, end, result, ..Run::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::tests::is_skipped;
    use std::time::Duration;

    /// Runs a whole migration of a small guest with two vCPUs. Skipped without QEMU or KVM.
    #[test]
    fn guest_is_observed_on_both_ends() {
        if is_skipped() {
            return;
        }
        let spec = QemuSpec {
            memory: 128 << 20,
            vcpus: 2,
            workload: "uniform,ws=16M,rate=20k,fill=random".into(),
            warm_up: Duration::from_millis(300),
            ..QemuSpec::default()
        };
        let run = stalls(&spec, &Link::Loopback).unwrap();
        let (stopped, arrived) = (run.source.last().unwrap(), &run.target[0]);
        assert!(stopped.at >= run.end && arrived.at >= stopped.at, "{run:?}");
        for (before, after) in stopped.vcpus.iter().zip(&arrived.vcpus) {
            assert!(after.reports >= before.reports + 2 && after.writes > before.writes, "{run:?}");
        }
        assert!(run.result.downtime <= run.result.total && !run.result.cpu_source.is_zero(), "{run:?}");
    }
}
