//! Recording of dirty bitmaps in real migrations, which `vmferry-bench scan` replays.

use super::hop::{self, Kind, Machine};
use super::no_kvm;
use crate::host;
use crate::scan::{Harvest, Recording, write_recordings};
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_core::{Layout, PageSet};
use vmferry_engine::{
    DirtyTracker, FreePages, GuestMemory, MachineConfig, Migratable, OnTimeout, PauseCosts, Protect,
    RegionFile, RingFigures, RunState, Section, Settings, SourceVm, StateReader, TrackerKind, VmError,
};

/// Bandwidth limit in bytes per second: 1 Gbit/s, so that a pass of the busy guest takes a while.
const BANDWIDTH: u64 = 125_000_000;

/// Number of harvests that are recorded of a guest. An idle guest has far more passes.
const MOST_HARVESTS: usize = 114;

/// Downtime limit that no pass reaches, so that the migration continues until its timeout.
const NO_DOWNTIME: Duration = Duration::from_micros(1);

/// Guest to record.
#[derive(Debug, Clone, Copy)]
struct Spec {
    name: &'static str,
    machine: Kind,
    workload: &'static str,
    /// Time after which the migration is completed.
    timeout: Duration,
}

/// Guests of the size of the published test. The busy guest writes nearly as fast as the link
/// carries.
const GUESTS: [Spec; 2] = [
    Spec {
        name: "idle",
        machine: Kind { kvm: true, memory: 512 << 20 },
        workload: "uniform,ws=16M,rate=500,fill=random",
        timeout: Duration::from_secs(3),
    },
    Spec {
        name: "busy",
        machine: Kind { kvm: true, memory: 512 << 20 },
        workload: "uniform,ws=64M,rate=25k,fill=random",
        timeout: Duration::from_secs(8),
    },
];

/// Records all guests, writes the recordings to the file `path`, and returns them.
pub(super) fn to_file(path: &Path, progress: &mut dyn FnMut(&str)) -> Result<Vec<Recording>> {
    if let Some(why) = no_kvm() {
        bail!("cannot record the dirty bitmaps of a KVM guest: {why}");
    }
    // The file is opened before the first migration, so that a wrong path costs no time.
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut recordings = Vec::new();
    for spec in GUESTS {
        progress(&format!("recording a migration of the {} guest", spec.name));
        recordings.push(record(spec).with_context(|| format!("recording the {} guest", spec.name))?);
    }
    write_recordings(&recordings, file).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(recordings)
}

fn record(spec: Spec) -> Result<Recording> {
    let mut machine = spec.machine.running(spec.workload)?;
    let recorder = Arc::new(Mutex::new(Recorder::default()));
    let mut source = Recorded { vm: machine.source(), recorder: Arc::clone(&recorder) };
    let settings = Settings {
        max_bandwidth: Some(BANDWIDTH),
        downtime_limit: NO_DOWNTIME,
        timeout: Some(spec.timeout),
        on_timeout: OnTimeout::Switch,
        stay_awake: false,
        ..Settings::default()
    };
    let (target, _): (Machine, _) = hop::moved(&mut source, spec.machine, &settings)?;
    ensure!(target.stats()?.corrupt() == 0, "the guest found damaged pages after the move");
    let Recorder { tracker, harvests } =
        std::mem::take(&mut *recorder.lock().unwrap_or_else(PoisonError::into_inner));
    ensure!(!harvests.is_empty(), "the migration harvested no dirty pages");
    Ok(Recording {
        guest: spec.name.into(),
        memory_bytes: spec.machine.memory,
        workload: spec.workload.into(),
        tracker: tracker.map_or_else(String::new, |kind| kind.to_string()),
        max_bandwidth_bytes_per_s: BANDWIDTH,
        host: host::describe(),
        harvests,
    })
}

/// Harvests of one migration.
#[derive(Debug, Default)]
struct Recorder {
    tracker: Option<TrackerKind>,
    harvests: Vec<Harvest>,
}

/// Source whose tracker records.
struct Recorded<'a> {
    vm: &'a mut dyn SourceVm,
    recorder: Arc<Mutex<Recorder>>,
}

impl Migratable for Recorded<'_> {
    fn config(&self) -> MachineConfig {
        self.vm.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.vm.memory()
    }
}

impl SourceVm for Recorded<'_> {
    fn description(&self) -> Vec<u8> {
        self.vm.description()
    }
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        let tracker = self.vm.tracker(kind)?;
        let recorder = Arc::clone(&self.recorder);
        recorder.lock().unwrap_or_else(PoisonError::into_inner).tracker = Some(tracker.kind());
        let layout = self.vm.memory().layout().clone();
        Ok(Box::new(RecordingTracker { tracker, layout, recorder, began: Instant::now() }))
    }
    fn share_memory(&mut self) -> Result<Vec<RegionFile>, VmError> {
        self.vm.share_memory()
    }
    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        self.vm.free_pages()
    }
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        self.vm.throttle(shares)
    }
    fn throttled(&self) -> Vec<Duration> {
        self.vm.throttled()
    }
    fn run_delays(&self) -> Vec<Duration> {
        self.vm.run_delays()
    }
    fn pause_costs(&self) -> PauseCosts {
        self.vm.pause_costs()
    }
    fn run_state(&self) -> RunState {
        self.vm.run_state()
    }
    fn pause(&mut self) -> Result<(), VmError> {
        self.vm.pause()
    }
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        self.vm.quiesce(within)
    }
    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.vm.save()
    }
    fn streams(&mut self) -> Result<Vec<Box<dyn StateReader>>, VmError> {
        self.vm.streams()
    }
    fn release(&mut self) -> Result<(), VmError> {
        self.vm.release()
    }
    fn resume(&mut self) -> Result<(), VmError> {
        self.vm.resume()
    }
}

/// Tracker that records what each harvest of another tracker finds.
struct RecordingTracker {
    tracker: Box<dyn DirtyTracker>,
    layout: Layout,
    recorder: Arc<Mutex<Recorder>>,
    /// Time at which tracking began.
    began: Instant,
}

impl RecordingTracker {
    /// Records the pages `found` of a harvest that took the time `took`.
    fn record(&self, found: &PageSet, took: Duration) {
        let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        if recorder.harvests.len() == MOST_HARVESTS {
            return;
        }
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let kernel = self.tracker.harvest_kernel_time();
        recorder.harvests.push(Harvest {
            at_ms: self.began.elapsed().as_secs_f64() * 1e3,
            kernel_us: kernel.map(us),
            walk_us: us(took.saturating_sub(kernel.unwrap_or_default())),
            pages: found.count(),
            bitmap: found.iter().flat_map(|(_, map)| map.flat().words().iter().copied()).collect(),
        });
    }
}

impl DirtyTracker for RecordingTracker {
    fn kind(&self) -> TrackerKind {
        self.tracker.kind()
    }
    fn start(&mut self) -> Result<(), VmError> {
        self.began = Instant::now();
        self.tracker.start()
    }
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        let mut found = PageSet::empty(&self.layout);
        let began = Instant::now();
        let harvested = self.tracker.harvest(&mut found);
        self.record(&found, began.elapsed());
        // The pages count even if the harvest failed after it had found them.
        for (region, map) in found.iter() {
            let into = dirty.region_mut(region);
            into.ok_or_else(|| VmError::new(format!("{region} is unknown")))?.union(map);
        }
        harvested
    }
    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.tracker.harvest_kernel_time()
    }
    fn protector(&self) -> Arc<dyn Protect> {
        self.tracker.protector()
    }
    fn ring(&self) -> Option<RingFigures> {
        self.tracker.ring()
    }
    fn stop(&mut self) -> Result<(), VmError> {
        self.tracker.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_sys::uffd::{FEATURE_WP, FEATURE_WP_ASYNC, FEATURE_WP_SHMEM, Userfaultfd};
    use vmferry_testkit::{Need, skip};

    #[test]
    fn every_harvest_of_a_migration_is_recorded() {
        if let Err(error) = Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM) {
            return skip(Need::Uffd, error);
        }
        let recording = record(Spec {
            name: "process",
            machine: Kind { kvm: false, memory: 16 << 20 },
            workload: "uniform,ws=4M,rate=20k,fill=random",
            timeout: Duration::from_millis(500),
        })
        .unwrap();
        assert_eq!((recording.tracker.as_str(), recording.memory_bytes), ("wp", 16 << 20));
        assert!(recording.harvests.len() <= MOST_HARVESTS);
        assert!(recording.harvests.iter().any(|harvest| harvest.pages > 0), "the guest wrote nothing");
        for harvest in &recording.harvests {
            let set: u64 = harvest.bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
            assert_eq!((set, harvest.bitmap.len()), (harvest.pages, 64));
            assert!(harvest.kernel_us > Some(0.0) && harvest.walk_us >= 0.0 && harvest.at_ms > 0.0);
        }
    }
}
