//! Tests of KVM guests that arrive in memory that the host allocates at different times.

use crate::confined::kvm;
use crate::rig::{corrupt, empty, patient, working};
use vmferry_bitmap::Bitmap;
use vmferry_engine::{
    Deltas, Migratable, MigrationHandle, MigrationState, PageCodec, Settings, SourceVm, ZstdLevel,
};
use vmferry_testkit::{print_line, skip_if_emulated};
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_vmm::{Prealloc, Vm, VmOptions};

const MEMORY: u64 = 96 << 20;
/// Workload with 40 MiB of random content, so that more than half of the memory is untouched.
const WORKLOAD: &str = "uniform,ws=8M,data=40M,rate=20k,fill=random";

fn options(prealloc: Prealloc, huge_pages: bool) -> VmOptions {
    let mut options = VmOptions::new(MEMORY, 1);
    (options.prealloc, options.huge_pages) = (prealloc, huge_pages);
    options
}

/// Returns the pages of each region that the host has allocated.
fn allocated(vm: &Vm) -> Vec<Bitmap> {
    let memory = vm.memory();
    let touched = |region: &vmferry_core::Region| {
        let mut touched = Bitmap::new(region.pages());
        memory.touched(region.id, region.run(), &mut touched).unwrap();
        touched
    };
    memory.layout().regions().iter().map(touched).collect()
}

fn count(pages: &[Bitmap]) -> u64 {
    pages.iter().map(Bitmap::count).sum()
}

/// Workload whose content can be compressed.
const TEXT: &str = "uniform,ws=8M,data=40M,rate=20k,fill=text";

/// Moves a guest to a target with these options, and has all pages compared and checked. Returns
/// the pages that each side has allocated.
fn moved(prealloc: Prealloc, huge_pages: bool, encoded: bool) -> [Vec<Bitmap>; 2] {
    let what = format!("{prealloc:?}, huge pages {huge_pages}, encoded {encoded}");
    let workload = if encoded { TEXT } else { WORKLOAD };
    let mut source = working(options(Prealloc::Off, huge_pages), workload, 1000);
    let mut target = empty(options(prealloc, huge_pages));
    let (codec, deltas) = match encoded {
        true => (PageCodec::Zstd(ZstdLevel::MIN), Deltas::On),
        false => (PageCodec::Raw, Deltas::Off),
    };
    let delta_cache = Some(MEMORY);
    let settings = Settings { verify: true, channels: 2, codec, deltas, delta_cache, ..patient() };
    let handle = MigrationHandle::new();
    let (report, came) = pair::moved(&unix_uri(), &mut source, &mut target, None, &settings, &handle);
    assert!(came.is_ok() && report.state == MigrationState::Completed, "{what}: {report:?}");
    // Pages that the guest reported as free are not compared.
    let compared = report.verified_pages + report.skipped_pages;
    assert_eq!((compared, report.mismatched_pages), (MEMORY >> 12, 0), "{what}");
    assert_eq!(corrupt(&target), 0, "{what}");
    let codecs = report.codecs.unwrap_or_default();
    assert_eq!((codecs.zstd.pages > 0, codecs.delta.pages > 0), (encoded, encoded), "{what}: {codecs:?}");
    SourceVm::pause(&mut target).unwrap();
    let found = [allocated(&source), allocated(&target)];
    let [ours, theirs] = found.each_ref().map(|pages| count(pages));
    print_line(format!("{what}: the source has {ours} pages, the target {theirs}"));
    found
}

#[test]
fn guest_arrives_complete_whenever_its_memory_is_allocated() {
    if !kvm() || skip_if_emulated("MADV_POPULATE_WRITE") {
        return;
    }
    for (huge_pages, encoded) in [(true, false), (true, true), (false, false), (false, true)] {
        for prealloc in [Prealloc::Off, Prealloc::Auto, Prealloc::On] {
            let [source, mut target] = moved(prealloc, huge_pages, encoded);
            if prealloc == Prealloc::On {
                assert_eq!(count(&target), MEMORY >> 12);
                continue;
            }
            // A huge page takes the room of pages that were not touched.
            if !huge_pages {
                target.iter_mut().zip(&source).for_each(|(target, source)| target.subtract(source));
                assert_eq!(count(&target), 0, "{prealloc:?}: pages that the guest never touched");
            }
        }
    }
}
