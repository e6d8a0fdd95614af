//! Tests that boot the guest under QEMU, with and without KVM, and change pages of its memory.
//!
//! 24 of its 64 MiB lie below 4 GiB, so that both of the guest's ways to map memory are used
//! without gigabytes.

mod rig;

use rig::{Guest, accelerators, wait};
use std::os::unix::fs::FileExt;
use vmferry_guest_abi::{GuestArgs, Line, State, StatsSink};

const MEMORY: u64 = 64 << 20;

fn boot(accelerator: &str, workload: &str, stats: StatsSink) -> Guest {
    let args = GuestArgs { stats, ..GuestArgs::new(workload.parse().unwrap()) };
    Guest::boot(accelerator, &args, MEMORY, &["-machine", "pc,memory-backend=ram,max-ram-below-4g=24M"])
}

#[test]
fn busy_and_idle_workloads_run_on_every_vcpu() {
    for accelerator in accelerators() {
        for workload in [
            "zipf:0.99,ws=8M,data=16M,rate=10k,fill=mix:30",
            "sequential,ws=8M,data=16M,rate=10k,write=append,fill=pointers",
            "idle,data=16M",
        ] {
            let guest = boot(accelerator, workload, StatsSink::Serial);
            let mut seen = [0; 2];
            guest.until(|line| match line {
                Line::Corrupt { .. } => panic!("{accelerator}: {line}"),
                Line::Stats { cpu, writes, .. } => {
                    assert_eq!(writes == 0, workload.starts_with("idle"), "{accelerator}: {line}");
                    seen[usize::try_from(cpu).unwrap()] += 1;
                    seen.iter().all(|lines| *lines >= 2).then_some(())
                }
                _ => None,
            });
        }
    }
}

#[test]
fn statistics_page_is_at_its_address() {
    for accelerator in accelerators() {
        let guest = boot(accelerator, "sequential,ws=8M,data=16M,rate=10k", StatsSink::Page);
        let (first, second) = (guest.verify(1), guest.verify(2));
        assert_eq!((first.state, first.data_pages, first.ws_pages), (State::Running, 4096, 2048));
        assert_eq!((first.cpus().len(), second.corrupt()), (2, 0));
        assert_eq!(first.ready_us, guest.ready.t_us);
        for (first, second) in first.cpus().iter().zip(second.cpus()) {
            assert!(
                second.t_us > first.t_us && second.reports > first.reports && second.writes > first.writes
            );
            assert!(second.sweeps >= 1 && second.checks >= first.checks + 2048, "{first:?} {second:?}");
        }
    }
}

#[test]
fn module_stays_in_memory_as_the_host_loaded_it() {
    let content: Vec<u8> = (0..5_000_123u32).map(|byte| (byte % 251) as u8).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("initrd");
    std::fs::write(&path, &content).unwrap();
    for accelerator in accelerators() {
        // The workload takes all memory but the module, the image and its tables.
        for top in ["24M", "60M"] {
            let args = GuestArgs {
                stats: StatsSink::Page,
                ..GuestArgs::new("sequential,ws=8M,data=56M,rate=10k".parse().unwrap())
            };
            let machine = format!("pc,memory-backend=ram,max-ram-below-4g={top}");
            let initrd = path.to_str().unwrap();
            let guest = Guest::boot(accelerator, &args, MEMORY, &["-machine", &machine, "-initrd", initrd]);
            assert_eq!(guest.verify(1).corrupt(), 0);
            let place = (0..MEMORY - content.len() as u64).step_by(4096);
            let is_there = |address: &u64| guest.page(*address)[..] == content[..4096];
            let address = place.into_iter().find(is_there).expect("the module's first page");
            let mut found = vec![0; content.len()];
            guest.memory.read_exact_at(&mut found, address).unwrap();
            assert!(found == content, "{accelerator}, {top}: the module has changed");
        }
    }
}

#[test]
fn guest_detects_a_lost_page() {
    for accelerator in accelerators() {
        // One page of the working set and one that was only filled, one of each vCPU, below and
        // above 4 GiB.
        for (workload, page) in [("uniform,ws=8M,data=16M,rate=10k", 7), ("idle,data=48M", 12_000)] {
            let guest = boot(accelerator, workload, StatsSink::Serial);
            guest.memory.write_all_at(&[0; 4096], guest.find(page)).unwrap();
            let found = guest.until(|line| match line {
                Line::Corrupt { corrupt, .. } => Some(corrupt),
                _ => None,
            });
            assert_eq!(found.page, page, "{accelerator}, {workload}");
            assert_eq!(guest.stats().state, State::Corrupt);
        }
    }
}

#[test]
fn guest_detects_an_old_version_of_a_page() {
    for accelerator in accelerators() {
        let guest = boot(accelerator, "uniform,ws=256K,data=8M,rate=10k", StatsSink::Page);
        let address = guest.find(3);
        let old = guest.page(address);
        // The second word of a page counts its writes.
        wait("a write of the page", || guest.page(address)[8..16] != old[8..16]);
        assert_eq!(guest.verify(1).corrupt(), 0);
        guest.memory.write_all_at(&old, address).unwrap();
        let stats = guest.verify(2);
        assert_eq!(stats.state, State::Corrupt, "{accelerator}");
        assert_eq!(stats.first_corrupt().map(|corrupt| corrupt.page), Some(3), "{accelerator}");
    }
}
