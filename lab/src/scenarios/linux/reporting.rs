//! Scenarios of a guest whose own balloon driver reports free pages to the host.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::pace::{Limit, stretched};
use crate::plan::Poisoning;
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;

/// Size of the deleted file in MiB: twelve copies of the kept file, which has random content.
const FILE_MIB: u64 = 96;
/// Pages of the deleted file.
const FILE_PAGES: u64 = FILE_MIB << 8;
/// Largest difference between the memory of the file and the memory that is reported or dropped,
/// in pages. Linux reports only free blocks of 2 MiB and more, so the blocks that the file shares
/// with other data stay. Other memory may become free meanwhile.
const SLACK_PAGES: u64 = FILE_PAGES / 4;
/// Interval after which a driver with nothing left to report is known to be silent. Linux reports
/// two seconds after the first block became free, and again every two seconds while there is more
/// (`PAGE_REPORTING_DELAY` in mm/page_reporting.c).
const SILENCE: Duration = seconds(5);
/// Longest time until the driver has reported all free memory.
const REPORTING: Duration = seconds(90);
const POLL: Duration = Duration::from_millis(500);

/// Content that a guest's kernel expects in its free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FreeContent {
    /// The kernel expects nothing.
    Any,
    /// The kernel clears each page when it is freed, and hands it out without clearing it again.
    Zeros,
    /// The kernel fills each page when it is freed, and checks the content when the page is
    /// allocated.
    Poison,
}

impl FreeContent {
    /// Returns the option of the kernel's command line.
    fn option(self) -> &'static str {
        match self {
            Self::Any => "",
            Self::Zeros => "init_on_free=1",
            Self::Poison => "page_poison=1",
        }
    }

    /// Returns the value that the driver writes to the balloon's configuration. `None` if the
    /// driver does not accept the feature `page-poison` (`virtballoon_validate` and
    /// `virtballoon_probe` in drivers/virtio/virtio_balloon.c).
    fn poison(self) -> Option<u64> {
        match self {
            Self::Any => None,
            Self::Zeros => Some(0),
            // PAGE_POISON in include/linux/poison.h, in each byte.
            Self::Poison => Some(0xaaaa_aaaa),
        }
    }
}

/// Counters of the balloon, and resident memory of the guest's process, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reported {
    reported: u64,
    dropped: u64,
    poisoned: u64,
    resident: u64,
}

impl Reported {
    fn of(vm: &Vm) -> Result<Self> {
        let status = vm.status()?;
        let figures = &status["vm"]["balloon"]["figures"];
        let of = |name: &str| figures[name].as_u64().with_context(|| format!("no figure {name}: {figures}"));
        Ok(Self {
            reported: of("reported_pages")?,
            dropped: of("dropped_pages")?,
            poisoned: of("poisoned_pages")?,
            resident: vm.resident()? >> 12,
        })
    }

    /// Waits until the driver has been silent for [`SILENCE`].
    fn settled(vm: &Vm) -> Result<Self> {
        let limit = Limit::new(REPORTING);
        let mut last = Self::of(vm)?;
        loop {
            std::thread::sleep(stretched(SILENCE));
            let now = Self::of(vm)?;
            if now.reported == last.reported {
                return Ok(now);
            }
            ensure!(!limit.is_over(), "the driver still reports after {}: {now:?}", limit.words());
            last = now;
        }
    }
}

/// Checks that the driver of an unmodified kernel reports the memory of a deleted file, that the
/// host drops or keeps this memory as the kernel requires, and that the guest then moves with all
/// its files.
pub(super) fn reports(lab: &mut Lab, content: FreeContent) -> Result<Verdict> {
    if let Some(why) = lacks(lab, content) {
        return Ok(Verdict::Skipped(why));
    }
    let mut rig = Rig::new(lab);
    if let (FreeContent::Poison, Poisoning::Kernel { kernel, initrd, .. }) =
        (content, &rig.lab.plan.poisoning)
    {
        (rig.boot.kernel, rig.boot.initrd) = (kernel.clone(), initrd.clone());
    }
    let guest = Guest {
        memory: "384M",
        options: format!("lab.stress_mib=16 {}", content.option()),
        ..Guest::usual()
    };
    let source = rig.boot(&guest)?;
    accepts(&source.status()?["vm"]["balloon"], content)?;
    ready(&source)?;
    let quiet = Reported::settled(&source)?;

    fill(&source)?;
    let full = Reported::of(&source)?;
    source.shell("rm /tmp/junk; echo deleted", "deleted")?;
    let after = returned(&source, content, full)?;
    rig.lab.figure("file_mib", FILE_MIB);
    for (name, pages) in [
        ("resident_quiet_mib", quiet.resident),
        ("resident_full_mib", full.resident),
        ("resident_deleted_mib", after.resident),
        ("reported_mib", after.reported - full.reported),
        ("dropped_mib", after.dropped - full.dropped),
        ("kept_for_poison_mib", after.poisoned - full.poisoned),
    ] {
        rig.lab.figure(name, pages >> 8);
    }
    fresh(&source)?;

    let target = rig.awaiting(&guest)?;
    let report = rig.carry(&source, &target, &["--mode", "precopy", "--free-pages", "on", "--verify"])?;
    let skipped = report["bytes"]["free_pages_skipped"].as_u64().unwrap_or(0);
    rig.lab.figure("skipped_mib", skipped >> 8);
    // A guest that relies on its free pages is not asked for them.
    ensure!(content == FreeContent::Any || skipped == 0, "{skipped} pages with a content were skipped");
    // The guest uses the memory again that was free during the move.
    fresh(&target)?;
    fill(&target)?;
    target
        .shell("for n in 1 2 3; do cat /tmp/kept; done | cmp -n 25165824 - /tmp/junk && echo same", "same")?;
    let after = target.verified("verify")?.guest_report;
    ensure!(after.complaints.is_empty(), "its kernel reports errors: {:?}", after.complaints);
    rig.lab.figure("target_resident_mib", target.resident()? >> 20);
    rig.power_off(&target)?;
    Ok(Verdict::Passed)
}

/// Returns the reason why the lab's kernels cannot run the scenario.
fn lacks(lab: &Lab, content: FreeContent) -> Option<String> {
    match (content, &lab.plan.poisoning) {
        (FreeContent::Poison, Poisoning::None { why }) => Some(why.clone()),
        (FreeContent::Poison, Poisoning::Kernel { .. }) => None,
        _ if lab.plan.kernel_lacks.is_empty() => None,
        _ => Some(format!("the guests' kernel was built without {}", lab.plan.kernel_lacks.join(", "))),
    }
}

/// Checks the features that the driver has accepted, and the content that it has announced.
fn accepts(balloon: &Value, content: FreeContent) -> Result<()> {
    let features = balloon["features"].as_array().context("the guest has no balloon")?;
    let has = |name: &str| features.iter().any(|feature| feature == name);
    ensure!(has("reporting"), "the driver does not report free pages: {features:?}");
    let poison = content.poison();
    ensure!(
        has("page-poison") == poison.is_some() && balloon["poison"].as_u64() == poison,
        "the driver accepted {features:?} with poison {}, not {poison:?}",
        balloon["poison"]
    );
    // No Linux driver knows the extension, so none of its features may be accepted.
    for name in ["ranges", "free-map", "hypercall"] {
        ensure!(!has(name), "the driver accepted {name}: docs/limits.md says that no Linux driver does");
    }
    Ok(())
}

/// Writes the file, from the kept one.
fn fill(vm: &Vm) -> Result<()> {
    let copies = FILE_MIB / 8;
    vm.shell(
        &format!("for n in $(seq {copies}); do cat /tmp/kept; done >/tmp/junk; sync; echo filled"),
        "filled",
    )
}

/// Checks that new memory of a process reads as zeros.
///
/// A kernel with `init_on_free=1` does not clear a page again that it hands out, so old content in
/// a dropped page would be visible to the process.
fn fresh(vm: &Vm) -> Result<()> {
    vm.shell(&format!("lab-guest fresh {FILE_MIB}"), "LAB-FRESH")
}

/// Waits until the memory of the deleted file has been reported, and checks what the host did.
fn returned(vm: &Vm, content: FreeContent, full: Reported) -> Result<Reported> {
    let limit = Limit::new(REPORTING);
    let after = loop {
        let now = Reported::of(vm)?;
        if now.reported - full.reported >= FILE_PAGES - SLACK_PAGES {
            break Reported::settled(vm)?;
        }
        ensure!(!limit.is_over(), "the driver does not report the file within {}: {now:?}", limit.words());
        std::thread::sleep(POLL);
    };
    let dropped = after.dropped - full.dropped;
    let poisoned = after.poisoned - full.poisoned;
    let fell = full.resident.saturating_sub(after.resident);
    let expected = FILE_PAGES - SLACK_PAGES..=FILE_PAGES + SLACK_PAGES;
    if content == FreeContent::Poison {
        ensure!(poisoned == after.reported - full.reported, "not every reported page was kept: {after:?}");
        ensure!(dropped == 0, "{dropped} pages with poison were dropped");
        ensure!(fell < SLACK_PAGES, "the host took {fell} pages from a guest that relies on them");
    } else {
        ensure!(poisoned == 0, "{poisoned} pages were kept, although zeros are no poison");
        ensure!(expected.contains(&dropped), "the host dropped {dropped} pages of {FILE_PAGES}");
        ensure!(expected.contains(&fell), "the resident memory fell by {fell} pages of {FILE_PAGES}");
    }
    Ok(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn features_must_fit_the_content_of_free_pages() {
        let balloon =
            |features: &[&str], poison: Option<u64>| json!({"features": features, "poison": poison});
        let plain = balloon(&["stats", "reporting"], None);
        let zeros = balloon(&["page-poison", "reporting"], Some(0));
        let poison = balloon(&["page-poison", "reporting"], Some(0xaaaa_aaaa));
        accepts(&plain, FreeContent::Any).unwrap();
        accepts(&zeros, FreeContent::Zeros).unwrap();
        accepts(&poison, FreeContent::Poison).unwrap();
        for (balloon, content) in [
            (&plain, FreeContent::Zeros),
            (&zeros, FreeContent::Any),
            (&zeros, FreeContent::Poison),
            (&poison, FreeContent::Zeros),
            (&balloon(&["stats"], None), FreeContent::Any),
            (&balloon(&["reporting", "ranges"], None), FreeContent::Any),
            (&json!(null), FreeContent::Any),
        ] {
            assert!(accepts(balloon, content).is_err(), "{balloon} {content:?}");
        }
    }
}
