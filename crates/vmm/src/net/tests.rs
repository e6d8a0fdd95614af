//! Tests of the network interface at real taps, each in a network namespace of its own, without
//! KVM.

use super::VmNet;
use super::testing::{Driver, Host, RX, TX, ram, sandbox};
use crate::boot::testing::TestElf;
use crate::bus::MmioDevice;
use crate::error::Error;
use crate::options::NetOptions;
use crate::state::Sections;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageIndex, PageRun, PageSet, RegionId};
use vmferry_engine::{DemandPaging, Migratable};
use vmferry_fault::{PagingSlot, UffdMemory, UffdOptions};
use vmferry_sys::tap::TapError;
use vmferry_testkit::{Need, PATIENCE, print_line, skip, wait};
use vmferry_virtio::device::Resume;
use vmferry_virtio::net::{HEADER, announcement};

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[test]
fn invalid_tap_is_a_clear_error() {
    sandbox(|tap| {
        let (ram, paging) = (ram(), Arc::new(PagingSlot::new(1)));
        let open = |name: &str| {
            let line = Box::new(super::testing::NoLine::default());
            VmNet::new((&ram, &paging), &NetOptions::new(name), 0, (line, None)).map(drop)
        };
        let error = |name: &str| match open(name) {
            Err(Error::Tap(error)) => error,
            other => panic!("{name}: {other:?}"),
        };
        for name in ["", "a/b", "a name", "a23456789012345x", "..", "tap%d", "ä"] {
            assert!(matches!(error(name), TapError::Name(_)), "{name}");
        }
        assert!(matches!(error("none0"), TapError::Missing(_)));
        assert!(error("none0").to_string().contains("ip tuntap add dev none0 mode tap"));
        assert!(matches!(error("lo"), TapError::Kind(_)), "another kind");
        open(tap).unwrap();
        let line = Box::new(super::testing::NoLine::default());
        let first = VmNet::new((&ram, &paging), &NetOptions::new(tap), 0, (line, None)).unwrap();
        assert!(matches!(error(tap), TapError::Busy(_)));
        drop(first);
        open(tap).unwrap();
    });
}

#[test]
fn frames_pass_in_both_directions_and_written_pages_are_marked() {
    sandbox(|tap| {
        let host = Host::at(tap);
        let mut driver = Driver::new(tap, None);
        let sections = driver.net.device().save().unwrap();
        assert_eq!(sections[0].name, "virtio-net");
        driver.device().resumed(Resume::First).unwrap();
        driver.start();
        // The thread receives without another notification, straight into the buffers: 20 of them
        // have room for more than a frame of 64 KiB.
        for n in 0..20 {
            driver.post(n);
        }
        let marks = driver.ram.regions()[0].marks().bitmap();
        let mut harvested = Bitmap::new(marks.len());
        driver.notify(RX);
        wait("the thread", || driver.net.status().wakeups > 0);
        for number in 0..40u8 {
            if number < 10 {
                marks.harvest(&mut harvested);
            }
            host.send(number, 300);
            let (buffer, frame) = driver.next_frame();
            assert_eq!(frame, host.frame(number, 300), "{number}");
            marks.harvest(&mut harvested);
            let page = driver.buffer(buffer) >> 12;
            assert!(harvested.test(page), "page {page} was written and is not marked");
            harvested.clear_all();
            driver.post(buffer);
            driver.notify(RX);
        }
        assert_eq!(driver.net.status().figures.rx_copied, 0);
        for number in 0..40 {
            let sent = driver.send(number, 200);
            assert_eq!(host.receive_own(PATIENCE), Some(sent), "{number}");
            wait("the buffer", || driver.used(TX) == u16::from(number) + 1);
        }
        marks.harvest(&mut harvested);
        assert!(!harvested.test(driver.frame_at() >> 12), "a page that was only read is marked");
        let figures = driver.net.status().figures;
        assert_eq!((figures.tx_frames, figures.tx_refused), (40, 0));
    });
}

#[test]
fn arriving_guest_is_announced_on_the_wire() {
    sandbox(|tap| {
        let host = Host::at(tap);
        let driver = Driver::new(tap, Some("52:54:00:00:00:07"));
        driver.device().resumed(Resume::First).unwrap();
        assert_eq!(
            host.receive_kind(0x8035, Duration::from_millis(200)),
            None,
            "announced before a migration"
        );
        assert!(driver.device().quiesce(soon()));
        let begin = Instant::now();
        driver.device().resumed(Resume::Moved).unwrap();
        let expected = announcement("52:54:00:00:00:07".parse().unwrap());
        let mut times = Vec::new();
        for _ in 0..6 {
            let frame = host.receive_kind(0x8035, PATIENCE).expect("an announcement");
            assert_eq!(frame, expected[HEADER..]);
            times.push(begin.elapsed());
        }
        print_line(format!("announcements after {times:?}"));
        assert!(times[5] >= Duration::from_millis(1200), "{times:?}");
        // The pauses grow by 100 ms, so a seventh announcement would come after 550 ms. On a busy
        // host the test may miss a defect.
        assert_eq!(host.receive_kind(0x8035, Duration::from_millis(700)), None, "a seventh announcement");
        assert!(driver.device().quiesce(soon()));
    });
}

#[test]
fn guest_continues_at_another_tap() {
    sandbox(|tap| {
        let host = Host::at(tap);
        let mut here = Driver::new(tap, None);
        here.device().resumed(Resume::First).unwrap();
        here.start();
        (0..8).for_each(|n| here.post(n));
        here.notify(RX);
        host.send(1, 100);
        assert_eq!(here.next_frame().1, host.frame(1, 100));
        assert!(here.device().quiesce(soon()));
        // This frame, and perhaps some that the host's kernel sent by itself.
        let used = here.used(RX);
        host.send(2, 100);
        let sections = here.device().save().unwrap();

        let other = host.another("tap1");
        let mut there = Driver::new("tap1", Some("52:54:00:00:00:08"));
        there.take_over(&here);
        let mut parts = Sections::new(&sections).unwrap();
        there.device().prepare(&mut parts).unwrap()().unwrap();
        parts.finish().unwrap();
        assert_eq!(there.net.status().mac, here.net.status().mac, "the guest keeps its address");
        there.device().resumed(Resume::Moved).unwrap();
        assert!(other.receive_kind(0x8035, PATIENCE).is_some());
        other.send(3, 100);
        assert_eq!(there.next_frame().1, other.frame(3, 100));
        let sent = there.send(4, 100);
        assert_eq!(other.receive_own(PATIENCE), Some(sent));
        // The other interface has carried frames since the second frame was sent to this one.
        assert_eq!(here.used(RX), used, "a halted interface wrote a frame");
        // The guest stays on the source after all. It has its buffers, and receives the frame that
        // arrived meanwhile.
        here.device().resumed(Resume::Again).unwrap();
        assert_eq!(here.next_frame().1, host.frame(2, 100));
        assert_eq!(host.receive_kind(0x8035, Duration::from_millis(200)), None);
    });
}

/// Hazard 18: a frame arrives whose page is still at the source, and the link is lost.
#[test]
fn no_thread_hangs_when_a_frame_waits_for_a_missing_page() {
    sandbox(|tap| {
        let host = Host::at(tap);
        let mut driver = Driver::new(tap, None);
        driver.device().resumed(Resume::First).unwrap();
        driver.start();
        assert!(driver.device().quiesce(soon()));
        // In this test no source sends pages that were never touched.
        let touch = |page| driver.ram.map().write_slice(&[0; 4096], GuestAddress(page)).unwrap();
        (0..3).for_each(|page| touch(Driver::rings(TX) + (page << 12)));
        (0..4).for_each(|n| touch(driver.buffer(n)));
        (0..4).for_each(|n| driver.post(n));
        let made = driver.paging.get_or_make(|threads| {
            let mut options = UffdOptions::new(threads);
            options.user_mode_only = true;
            let regions = driver.ram.regions().iter().map(|ram| ram.paged().unwrap()).collect();
            // SAFETY: the RAM owns its mappings; no references to guest bytes are made here.
            unsafe { UffdMemory::new(regions, Arc::clone(&driver.ram) as _, &options) }
        });
        let memory = match made {
            Ok(memory) => memory,
            Err(error) => return skip(Need::Uffd, error),
        };
        // A test that fails must not wait for the thread either.
        struct End(Arc<UffdMemory>);
        impl Drop for End {
            fn drop(&mut self) {
                let _ = self.0.end();
            }
        }
        let _end = End(Arc::clone(&memory));
        for missing in [driver.buffer(0) >> 12, Driver::rings(RX) >> 12] {
            let mut pages = PageSet::empty(driver.ram.layout());
            pages.region_mut(RegionId(0)).unwrap().set(missing);
            let mut page = [0; 4096];
            driver.ram.map().read_slice(&mut page, GuestAddress(missing << 12)).unwrap();
            let before = driver.used(RX);
            memory.begin(&pages).unwrap();
            driver.device().resumed(Resume::Again).unwrap();
            host.send(1, 100);
            let shard = memory.shard_of(RegionId(0), PageIndex(missing));
            let fault = memory.next_fault(shard, PATIENCE).unwrap().expect("the thread touches the page");
            assert_eq!(fault.page, PageIndex(missing));
            assert!(
                !driver.device().quiesce(Instant::now() + Duration::from_millis(100)),
                "quiesced while the thread sleeps"
            );
            // The page arrives only after this. A status that waits for it would never return.
            assert!(driver.net.status().driver);
            // The page arrives, and everything continues.
            memory.place(RegionId(0), PageRun::from(missing..missing + 1), &page).unwrap();
            assert!(driver.device().quiesce(soon()));
            driver.device().resumed(Resume::Again).unwrap();
            wait("the frame", || driver.used(RX) > before);
            assert_eq!(driver.next_frame().1, host.frame(1, 100));
            assert!(driver.device().quiesce(soon()));
            memory.end().unwrap();
        }
        assert!(driver.net.status().figures.rx_copied >= 2);
    });
}

#[test]
fn copy_gets_the_addresses_of_its_own_vm_and_is_not_announced() {
    if let Err(error) = crate::open_kvm() {
        return skip(Need::Kvm, error);
    }
    sandbox(|tap| {
        let (_host, other) = (Host::at(tap), Host::at(tap).another("tap1"));
        let options = |tap: &str| {
            let mut options = crate::VmOptions::new(8 << 20, 1);
            options.nets = vec![NetOptions::new(tap)];
            options
        };
        let mut source = crate::Vm::new(options(tap)).unwrap();
        source.load_kernel(&TestElf::with_entry(&[0xf4, 0xeb, 0xfd]).build(), "").unwrap();
        let saved = source.save_state().unwrap();
        let original = source.handle().nets()[0].mac;
        for (new_macs, copy, given) in [
            (true, true, None),
            (true, true, Some("52:54:00:00:00:09")),
            (false, true, Some("52:54:00:00:00:09")),
            (true, false, None),
        ] {
            let mut target = options("tap1");
            (target.incoming, target.new_macs) = (true, new_macs);
            target.nets[0].mac = given.map(|mac| mac.parse().unwrap());
            let mut target = crate::Vm::new(target).unwrap();
            target.load_state(&saved).unwrap();
            if copy {
                target.renew_identity().unwrap();
            }
            target.start().unwrap();
            let mac = target.handle().nets()[0].mac;
            match given.filter(|_| new_macs) {
                Some(given) => assert_eq!(mac.to_string(), given),
                None if new_macs && copy => {
                    assert!(mac != original && mac.bytes()[0] & 3 == 2, "{mac} is locally administered")
                }
                None => assert_eq!(mac, original),
            }
            if new_macs && copy {
                assert_eq!(other.receive_kind(0x8035, Duration::from_millis(100)), None);
            } else {
                assert!(other.receive_kind(0x8035, PATIENCE).is_some());
            }
        }
    });
}

/// A complete migration of a VM whose guest has no network driver. The network learns the guest's
/// new location all the same.
#[test]
fn migrated_vm_is_announced_at_its_new_tap() {
    if let Err(error) = crate::open_kvm() {
        return skip(Need::Kvm, error);
    }
    sandbox(|tap| {
        let (host, other) = (Host::at(tap), Host::at(tap).another("tap1"));
        let options = |tap: &str| {
            let mut options = crate::VmOptions::new(64 << 20, 1);
            options.nets = vec![NetOptions::new(tap)];
            options
        };
        let mut source = crate::Vm::new(options(tap)).unwrap();
        let devices = |vm: &crate::Vm| vm.config().extra.into_iter().find(|(key, _)| key == "devices");
        assert!(devices(&source).unwrap().1.ends_with("virtio-net"));
        source.load_kernel(vmferry_guest_image::ELF, "workload=idle").unwrap();
        source.start().unwrap();
        assert_eq!(host.receive_kind(0x8035, Duration::from_millis(200)), None);
        source.pause().unwrap();
        let saved = source.save_state().unwrap();
        let mut target = options("tap1");
        target.incoming = true;
        let mut target = crate::Vm::new(target).unwrap();
        let mut page = [0; 4096];
        for at in (0..64u64 << 20).step_by(page.len()).map(GuestAddress) {
            source.ram().map().read_slice(&mut page, at).unwrap();
            target.ram().map().write_slice(&page, at).unwrap();
        }
        target.load_state(&saved).unwrap();
        assert_eq!(
            other.receive_kind(0x8035, Duration::from_millis(100)),
            None,
            "announced before the guest runs"
        );
        target.start().unwrap();
        let mac = source.handle().nets()[0].mac;
        assert_eq!(target.handle().nets()[0].mac, mac);
        assert_eq!(
            other.receive_kind(0x8035, PATIENCE).expect("an announcement"),
            announcement(mac)[HEADER..]
        );
        // Paused in the middle of its announcements, the guest continues with them.
        target.pause().unwrap();
        target.resume().unwrap();
        assert!(other.receive_kind(0x8035, PATIENCE).is_some());
        target.stop();
        source.stop();
    });
}
