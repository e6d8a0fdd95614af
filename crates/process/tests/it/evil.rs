//! Hostile sources that hand a guest over before its memory, and connections from unrelated peers.

use crate::rig::{can_fault, options, running, take, whole};
use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, RegionId};
use vmferry_engine::Section;
use vmferry_engine::{
    Arrival, GuestMemory, Listener, MachineConfig, Migratable, MigrationState, PostcopyState, PostcopyWatch,
    ReceiveFailure, SourceVm, Uri,
};
use vmferry_process::ProcessGuest;
use vmferry_testkit::{PATIENCE, wait, wait_for};
use vmferry_testkit_peers::peer::Source;
use vmferry_wire::{
    FrameKind, MissingPages, Mode, REQUEST_BYTES, RefusalCode, Request, Role, ToSource, ToTarget, Token,
};

/// Number of pages of the guest in these tests.
const PAGES: u64 = 6144;

/// Scripted source that has a real guest to send.
struct Evil {
    source: Source,
    sections: Vec<Section>,
    memory: Arc<dyn GuestMemory>,
    /// Memory of the target.
    there: Arc<dyn GuestMemory>,
}

impl Deref for Evil {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.source
    }
}

impl DerefMut for Evil {
    fn deref_mut(&mut self) -> &mut Source {
        &mut self.source
    }
}

impl Evil {
    /// Offers the guest and opens the channels. Returns the target's answer if it is not an
    /// acceptance.
    fn begin(&mut self, machine: &MachineConfig, mode: Mode, bulk: u16, urgent: u16) -> Option<ToSource> {
        let answer = self.offer(machine, mode, bulk, urgent);
        let Some(ToSource::Accept { bulk: token, urgent: other, .. }) = answer else { return answer };
        self.open((bulk, token), (urgent, other));
        None
    }

    fn content(&self, page: u64) -> Vec<u8> {
        content(&self.memory, page)
    }

    /// Waits until the target has read what was sent on a bulk channel before the handover. A page
    /// that follows on the channel shows this.
    fn until_read(&mut self, channel: usize, page: u64) {
        self.send_page(channel, page);
        wait("a page at the target", || content(&self.there, page) == self.content(page));
    }

    fn send_page(&mut self, channel: usize, page: u64) {
        let content = self.content(page);
        self.frame(channel, 1, page, &content, |_| {});
    }

    /// Sends a page whose content does not match its digest.
    fn damaged(&mut self, channel: usize, page: u64) {
        self.frame(channel, 1, page, &[1; PAGE_BYTES], |frame| frame.content.fill(2));
    }

    fn state(&mut self) {
        let sections = std::mem::take(&mut self.sections);
        let count = u32::try_from(sections.len()).unwrap();
        sections.into_iter().for_each(|section| self.send(&ToTarget::Section(section)));
        self.send(&ToTarget::StateEnd { sections: count });
    }

    fn missing(&mut self, first: u64, bytes: usize) {
        let words = vec![0xff; bytes];
        self.send(&ToTarget::Lacking(MissingPages { region: RegionId(0), first, words }));
    }

    /// Hands the guest over with every page missing.
    fn hand_over(&mut self) {
        self.state();
        self.missing(0, 768);
        self.send(&ToTarget::LoadLazily { pages: PAGES });
        assert!(matches!(self.receive(), Some(ToSource::Ready { .. })));
        self.send(&ToTarget::Commit);
        assert!(matches!(self.receive(), Some(ToSource::Running { .. })));
    }

    /// Recovers the link. Returns the pages that the target reports as missing.
    fn come_back(&mut self) -> Vec<u64> {
        self.reconnect();
        let mut missing = Vec::new();
        loop {
            match self.receive().unwrap() {
                ToSource::Lacking(MissingPages { first, words, .. }) => {
                    let bits = |(at, byte): (usize, &u8)| {
                        let at = first + at as u64 * 8;
                        let byte = *byte;
                        (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| at + bit)
                    };
                    missing.extend(words.iter().enumerate().flat_map(bits));
                }
                ToSource::Resume { pages, bulk, urgent } => {
                    assert_eq!(missing.len() as u64, pages);
                    self.data.clear();
                    self.open((1, bulk), (1, urgent));
                    return missing;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Plays the rest of a correct migration.
    fn finish(&mut self, missing: &[u64]) {
        for page in missing {
            self.send_page(0, *page);
        }
        while !matches!(self.receive().expect("the link holds"), ToSource::Complete(_)) {}
        self.send(&ToTarget::Thanks);
    }
}

fn content(memory: &Arc<dyn GuestMemory>, page: u64) -> Vec<u8> {
    let mut content = [0; PAGE_BYTES];
    memory.window(RegionId(0), PageRun::new(PageIndex(page), 1)).unwrap().copy_page(0, &mut content);
    content.to_vec()
}

/// Returns what the target reports after `act` was done to it.
fn visit(
    act: impl FnOnce(&mut Evil, &MachineConfig, &dyn Fn() -> PostcopyState),
) -> (Result<PostcopyState, ReceiveFailure>, ProcessGuest) {
    let (mut source, mut target) = (running(), ProcessGuest::new_incoming(options()).unwrap());
    SourceVm::pause(&mut source).unwrap();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse::<Uri>().unwrap(), false).unwrap();
    let uri = listener.uri().unwrap();
    let machine = target.config();
    let (arrival, watch, there) = (Arrival::new(PATIENCE), Mutex::default(), target.memory());
    let received = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| take(&mut target, &listener, &arrival, &watch));
        let scripted = Source::new(&uri);
        let (sections, memory) = (source.save().unwrap(), source.memory());
        let mut evil = Evil { source: scripted, sections, memory, there };
        let postcopy = || {
            let now = || watch.lock().unwrap().as_ref().map(PostcopyWatch::now);
            wait_for("the guest at the target", || now().ok_or("no guest has arrived"))
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| act(&mut evil, &machine, &postcopy))) {
            arrival.abandon();
            resume_unwind(panic);
        }
        while evil.receive().is_some() {}
        drop(evil);
        arrival.abandon();
        receiving.join().unwrap()
    });
    (received, target)
}

fn refused(what: &str, mode: Mode, bulk: u16, act: impl FnOnce(&mut Evil)) {
    let (received, target) = visit(|evil, machine, _| {
        let urgent = u16::from(mode != Mode::Precopy);
        assert_eq!(evil.begin(machine, mode, bulk, urgent), None);
        act(evil);
    });
    let why = received.unwrap_err().to_string();
    assert!(why.contains(what), "wanted '{what}', got '{why}'");
    assert!(
        target.handle().stats().is_ok_and(|stats| stats.writes() == 0) || target.handle().stats().is_err()
    );
}

#[test]
fn target_does_not_start_a_guest_after_a_protocol_violation() {
    if !can_fault() {
        return;
    }
    let page = |evil: &mut Evil, channel| evil.send_page(channel, 300);
    refused("on an urgent channel before the handover", Mode::Postcopy, 1, |evil| page(evil, 1));
    refused("on bulk channels", Mode::Postcopy, 1, |evil| evil.barrier(1, 0));
    refused("device state it has not sent", Mode::Postcopy, 1, |evil| {
        evil.missing(0, 768);
        evil.send(&ToTarget::LoadLazily { pages: PAGES });
    });
    for pages in [0, PAGES - 1, u64::MAX] {
        refused("were announced", Mode::Postcopy, 1, |evil| {
            evil.state();
            evil.missing(0, 768);
            evil.send(&ToTarget::LoadLazily { pages });
        });
    }
    refused("in the middle of a pass", Mode::Hybrid, 2, |evil| {
        evil.state();
        evil.barrier(0, 0);
        evil.until_read(0, 300);
        evil.missing(0, 768);
        evil.send(&ToTarget::LoadLazily { pages: PAGES });
    });
    refused("Lacking, which is not allowed", Mode::Precopy, 1, |evil| evil.missing(0, 8));
    refused("LoadLazily, which is not allowed", Mode::Precopy, 1, |evil| {
        evil.send(&ToTarget::LoadLazily { pages: 0 });
    });
    refused("beyond its end", Mode::Hybrid, 1, |evil| evil.missing(PAGES, 8));
    refused("has a length or an offset that the protocol does not allow", Mode::Hybrid, 1, |evil| {
        evil.missing(0, 7)
    });
    // A page with a digest mismatch that is not among the pages to be sent again.
    refused("a page with a digest mismatch", Mode::Hybrid, 1, |evil| {
        evil.damaged(0, 300);
        evil.barrier(0, 0);
        assert!(matches!(evil.receive(), Some(ToSource::Received { mismatches: 1, .. })));
        evil.state();
        evil.send(&ToTarget::LoadLazily { pages: 0 });
    });
    // The source goes right before the commit. The target cannot know that the commit was not sent,
    // and stays so that it can be asked.
    refused("before the guest was started on the target", Mode::Postcopy, 1, |evil| {
        evil.state();
        evil.missing(0, 768);
        evil.send(&ToTarget::LoadLazily { pages: PAGES });
        assert!(matches!(evil.receive(), Some(ToSource::Ready { .. })));
        evil.control.shutdown(std::net::Shutdown::Both).unwrap();
        for _ in 0..3 {
            assert_eq!(evil.refused(Role::Control, Token([9; 16])), Some(RefusalCode::Busy));
            evil.reconnect();
            assert!(matches!(evil.receive(), Some(ToSource::Returned(_))));
            // The commit comes too late.
            evil.send(&ToTarget::Commit);
            evil.send(&ToTarget::Ping(5));
            assert!(matches!(evil.receive(), Some(ToSource::Pong(5))), "no guest is started");
        }
        evil.send(&ToTarget::Thanks);
    });
}

#[test]
fn target_does_not_start_a_guest_after_an_impossible_announcement() {
    if !can_fault() {
        return;
    }
    let region = RegionId(0);
    for pages in [PAGES - 511..PAGES + 1, PAGES..PAGES + 512, 1 << 50..(1 << 50) + 512] {
        refused("within the region", Mode::Precopy, 1, |evil| evil.announce(0, region, pages));
    }
    refused("region", Mode::Precopy, 1, |evil| evil.announce(0, RegionId(77), 0..512));
    refused("on an urgent channel before the handover", Mode::Postcopy, 1, |evil| {
        evil.announce(1, region, 0..512);
    });
    refused("pages in a frame", Mode::Precopy, 1, |evil| {
        evil.frame(0, 0, 300, &[1; PAGE_BYTES], |frame| frame.header.kind = FrameKind::Touched);
    });
}

/// A source that has sent a page announces all pages again and again.
#[test]
fn target_allocates_little_for_pages_that_are_only_announced() {
    if !can_fault() {
        return;
    }
    refused("LoadLazily, which is not allowed", Mode::Precopy, 1, |evil| {
        evil.until_read(0, 300);
        for _ in 0..20 {
            evil.announce(0, RegionId(0), 0..PAGES);
            std::thread::sleep(Duration::from_millis(20));
        }
        evil.until_read(0, 301);
        let mut touched = Bitmap::new(PAGES);
        evil.there.touched(RegionId(0), PageRun::from(0..PAGES), &mut touched).unwrap();
        // One block has the pages that were sent, and one may be allocated in vain. If the memory
        // does not begin at a huge page, a block is a part of two huge pages.
        assert!(touched.count() <= 4 * 512, "{:?}", touched.runs().collect::<Vec<_>>());
        evil.send(&ToTarget::LoadLazily { pages: 0 });
    });
}

/// Announcements repeat, name pages that arrive later by demand paging, and come after the first
/// pass. No page that is populated for them may count as present.
#[test]
fn guest_arrives_complete_whatever_its_source_announces() {
    if !can_fault() {
        return;
    }
    let (received, target) = visit(|evil, machine, _| {
        assert_eq!(evil.begin(machine, Mode::Hybrid, 1, 1), None);
        let region = RegionId(0);
        for first in (0..PAGES / 512).rev().map(|block| block * 512) {
            evil.announce(0, region, 0..PAGES);
            evil.announce(0, region, first..first + 512);
            evil.announce(0, region, first..first + 1);
        }
        evil.until_read(0, 300);
        // The target measures its processors from the first page on, and only then populates.
        std::thread::sleep(Duration::from_millis(250));
        evil.announce(0, region, 0..PAGES);
        std::thread::sleep(Duration::from_millis(50));
        evil.barrier(0, 0);
        assert!(matches!(evil.receive(), Some(ToSource::Received { .. })));
        evil.announce(0, region, 0..PAGES);
        evil.until_read(0, 301);
        evil.hand_over();
        evil.finish(&(0..PAGES).collect::<Vec<_>>());
    });
    let postcopy = received.unwrap();
    assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0), "{postcopy:?}");
    whole(&target, "announced");
}

#[test]
fn target_refuses_impossible_numbers_of_urgent_channels() {
    if !can_fault() {
        return;
    }
    for (mode, urgent) in
        [(Mode::Postcopy, 0), (Mode::Hybrid, 65), (Mode::Postcopy, u16::MAX), (Mode::Precopy, 1)]
    {
        let (received, _) = visit(|evil, machine, _| {
            let Some(ToSource::Failed(why)) = evil.begin(machine, mode, 1, urgent) else {
                panic!("accepted")
            };
            assert!(why.detail.contains("urgent channels ("), "{why}");
        });
        assert!(matches!(received, Err(ReceiveFailure::Stopped)), "the target keeps waiting: {received:?}");
    }
}

/// Pages are sent twice, damaged and out of range, and the link is lost and recovered, while a
/// third peer tries as well. The guest keeps the first undamaged copy of each page.
#[test]
fn running_guest_keeps_the_first_intact_copy_of_each_page() {
    if !can_fault() {
        return;
    }
    let (received, target) = visit(|evil, machine, postcopy| {
        assert_eq!(evil.begin(machine, Mode::Postcopy, 1, 1), None);
        evil.hand_over();
        // Page 1000 twice, with other content the second time.
        evil.send_page(0, 1000);
        wait("the first", || postcopy().left == PAGES - 1);
        evil.frame(1, 1, 1000, &[3; PAGE_BYTES], |_| {});
        wait("the second", || postcopy().postcopy.duplicates == 1);
        // A damaged page is requested again on an urgent channel, after the guest's own requests.
        let good = evil.content(1001);
        evil.frame(0, 1, 1001, &good, |frame| frame.content.fill(4));
        let mut bytes = [0; REQUEST_BYTES];
        let again = Request::Page { region: RegionId(0), page: PageIndex(1001), ahead: 0, again: true };
        loop {
            evil.data[1].0.read_exact(&mut bytes).unwrap();
            if Request::decode(&bytes).unwrap() == again {
                break;
            }
        }
        // An unrelated peer, and a peer that knows only the migration's name.
        assert_eq!(evil.refused(Role::Control, Token::NONE), Some(RefusalCode::Busy));
        assert_eq!(evil.refused(Role::Control, Token([9; 16])), Some(RefusalCode::Busy));
        assert_eq!(evil.refused(Role::Bulk, Token([9; 16])), Some(RefusalCode::Token));
        assert_eq!(postcopy().state, MigrationState::Postcopy, "none of this loses the link");
        // The source notices the loss first. The target has not noticed anything.
        let missing = evil.come_back();
        assert!(missing.contains(&1001) && !missing.contains(&1000), "{}", missing.len());
        wait("the link", || postcopy().state == MigrationState::Postcopy);
        // An out-of-range page makes the target drop this link. The next link brings the rest.
        evil.frame(0, 1, PAGES, &[5; PAGE_BYTES], |_| {});
        wait("the loss", || postcopy().state == MigrationState::PostcopyPaused);
        let missing = evil.come_back();
        evil.finish(&missing);
    });
    let postcopy = received.unwrap();
    assert_eq!(
        (postcopy.state, postcopy.left, postcopy.postcopy.duplicates),
        (MigrationState::Completed, 0, 1),
        "{postcopy:?}"
    );
    whole(&target, "borne");
}

/// If digests never match, the target drops the link after 10,000 pages, but not the guest.
#[test]
fn link_ends_when_digests_never_match() {
    if !can_fault() {
        return;
    }
    let (received, target) = visit(|evil, machine, postcopy| {
        assert_eq!(evil.begin(machine, Mode::Postcopy, 1, 1), None);
        evil.hand_over();
        // The target's requests are read and ignored.
        let mut urgent = evil.data[1].0.try_clone().unwrap();
        let reading = std::thread::spawn(move || while matches!(urgent.read(&mut [0; 4096]), Ok(1..)) {});
        for _ in 0..10_010 {
            evil.damaged(0, 2000);
        }
        wait("the loss", || postcopy().state == MigrationState::PostcopyPaused);
        assert!(postcopy().why.is_some_and(|why| why.contains("thousands of pages")), "{:?}", postcopy().why);
        reading.join().unwrap();
        let missing = evil.come_back();
        evil.finish(&missing);
    });
    assert_eq!(received.unwrap().state, MigrationState::Completed);
    whole(&target, "damaged for long");
}
