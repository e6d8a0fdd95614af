//! The guest's state besides its memory, as versioned sections.

use crate::Error;
use crate::clock::SavedClock;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmferry_engine::Section;
use vmferry_guest_abi::{SavedWorker, Workload};

const VERSION: u32 = 1;
const WORKLOAD: &str = "process-workload";
const CLOCK: &str = "process-clock";
const WORKER: &str = "process-worker";
const HEAP: &str = "process-heap";

/// Saved state of a guest.
#[derive(Debug, PartialEq)]
pub(crate) struct Saved {
    pub(crate) workload: Workload,
    pub(crate) clock: SavedClock,
    pub(crate) workers: Vec<SavedWorker>,
    /// Number of pages of the heap, whose content is in memory.
    pub(crate) heap: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct WorkloadV1 {
    /// Workload in the form of the command line.
    spec: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct HeapV1 {
    pages: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct WorkerV1 {
    words: Vec<u64>,
}

impl Saved {
    pub(crate) fn sections(&self) -> Result<Vec<Section>, Error> {
        let mut sections = vec![
            section(WORKLOAD, 0, &WorkloadV1 { spec: self.workload.to_string() })?,
            section(CLOCK, 0, &self.clock)?,
        ];
        for (worker, index) in self.workers.iter().zip(0..) {
            sections.push(section(WORKER, index, &WorkerV1 { words: worker.words.to_vec() })?);
        }
        if self.heap > 0 {
            sections.push(section(HEAP, 0, &HeapV1 { pages: self.heap })?);
        }
        Ok(sections)
    }

    /// Reads the sections of a guest with `cpus` threads. Each section must exist exactly once, and
    /// no other section may exist. The section of the heap exists only if the guest has one.
    pub(crate) fn from_sections(sections: &[Section], cpus: u32) -> Result<Self, Error> {
        let known = |s: &&Section| ![WORKLOAD, CLOCK, WORKER, HEAP].contains(&s.name.as_str());
        if let Some(unknown) = sections.iter().find(known) {
            return Err(Error::State(format!("section '{}' is unknown", unknown.name)));
        }
        let heap = sections.iter().any(|section| section.name == HEAP);
        let expected = usize::try_from(cpus).map_or(usize::MAX, |cpus| cpus + 2 + usize::from(heap));
        if sections.len() != expected {
            return Err(Error::State(format!(
                "{} sections were received, {expected} are needed",
                sections.len()
            )));
        }
        let workload: WorkloadV1 = find(sections, WORKLOAD, 0)?;
        let workers = (0..cpus).map(|index| {
            let saved: WorkerV1 = find(sections, WORKER, index)?;
            let count = saved.words.len();
            let words = saved.words.try_into().map_err(|_| {
                Error::State(format!("worker {index} has {count} words, {} are needed", SavedWorker::WORDS))
            })?;
            Ok(SavedWorker { words })
        });
        Ok(Self {
            workload: workload.spec.parse().map_err(Error::SavedWorkload)?,
            clock: find(sections, CLOCK, 0)?,
            workers: workers.collect::<Result<_, Error>>()?,
            heap: if heap { find::<HeapV1>(sections, HEAP, 0)?.pages } else { 0 },
        })
    }
}

fn section(name: &str, instance: u32, state: &impl Serialize) -> Result<Section, Error> {
    let payload = postcard::to_stdvec(state).map_err(|error| Error::State(error.to_string()))?;
    Ok(Section { name: name.into(), instance, version: VERSION, payload })
}

fn find<T: DeserializeOwned>(sections: &[Section], name: &str, instance: u32) -> Result<T, Error> {
    let mut found = sections.iter().filter(|s| s.name == name && s.instance == instance);
    let (Some(section), None) = (found.next(), found.next()) else {
        return Err(Error::State(format!("section '{name}' {instance} is missing or duplicated")));
    };
    if section.version != VERSION {
        return Err(Error::State(format!(
            "section '{name}' has version {}, this vmferry reads {VERSION}",
            section.version
        )));
    }
    match postcard::take_from_bytes(&section.payload) {
        Ok((state, [])) => Ok(state),
        Ok(_) => Err(Error::State(format!("section '{name}' is longer than its content"))),
        Err(error) => Err(Error::State(format!("section '{name}' cannot be read: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn saved(cpus: u32, seed: u64) -> Saved {
        let word = |i: u64| seed.wrapping_mul(i + 1).rotate_left(17);
        Saved {
            workload: "uniform,ws=4M,rate=100k,fill=random".parse().unwrap(),
            clock: SavedClock { ns: seed, realtime_ns: !seed },
            workers: (0..cpus)
                .map(|cpu| SavedWorker {
                    words: std::array::from_fn(|i| word(i as u64 + 1000 * u64::from(cpu))),
                })
                .collect(),
            heap: seed % 3,
        }
    }

    proptest! {
        #[test]
        fn state_survives_its_sections(cpus in 1u32..8, seed: u64) {
            let state = saved(cpus, seed);
            prop_assert_eq!(Saved::from_sections(&state.sections().unwrap(), cpus).unwrap(), state);
        }

        #[test]
        fn any_payload_is_an_error_or_a_state(payload in prop::collection::vec(any::<u8>(), 0..64), which in 0usize..3) {
            let mut sections = saved(1, 7).sections().unwrap();
            sections[which].payload = payload;
            let _ = Saved::from_sections(&sections, 1);
        }
    }

    #[test]
    fn error_names_section_that_is_missing_unknown_or_of_another_version() {
        let sections = saved(2, 6).sections().unwrap();
        let refused = |sections: &[Section]| Saved::from_sections(sections, 2).unwrap_err().to_string();
        assert!(refused(&sections[..3]).contains("3 sections were received, 4 are needed"));
        let mut twice = sections.clone();
        twice[3] = twice[2].clone();
        assert!(refused(&twice).contains("'process-worker' 0 is missing or duplicated"));
        let mut newer = sections.clone();
        newer[1].version = 9;
        assert!(refused(&newer).contains("'process-clock' has version 9"));
        let mut foreign = sections.clone();
        foreign[0].name = "vcpu".into();
        assert!(refused(&foreign).contains("'vcpu' is unknown"));
        let mut long = sections;
        long[0].payload.push(0);
        assert!(refused(&long).contains("longer"));
    }
}
