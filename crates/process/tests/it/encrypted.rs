//! The same over encrypted connections.

use crate::authority::Authority;
use crate::rig::{can_fault, go, settings};
use vmferry_engine::{MigrationMode, Settings, Tls};
use vmferry_testkit_peers::link::{Harm, Rule};
use vmferry_wire::Role;

fn encrypted() -> Settings {
    let authority = Authority::new();
    let (certificate, key) = authority.issue("127.0.0.1");
    let tls = Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.pem.as_bytes()).unwrap();
    Settings { tls: Some(tls), ..settings(MigrationMode::Postcopy) }
}

#[test]
fn pages_come_to_a_running_guest() {
    if !can_fault() {
        return;
    }
    let moved = go(&encrypted(), vec![], |_| {});
    let report = moved.completed("encrypted");
    assert_eq!(report.interruptions, 0);
    assert!(report.postcopy.as_ref().is_some_and(|postcopy| postcopy.faults > 0), "{report:?}");
}

/// A link that was cut, or a byte that was changed, which is the end of an encrypted connection: it is taken up again, encrypted, and no
/// page is lost or taken damaged.
#[test]
fn a_lost_link_is_taken_up_again() {
    if !can_fault() {
        return;
    }
    let mut interrupted = 0;
    for (role, to_target, after, harm) in [
        (Role::Bulk, true, 300_000, Harm::CutAll),
        (Role::Bulk, true, 1_500_000, Harm::Flip),
        (Role::Urgent, true, 9_000, Harm::Flip),
        (Role::Urgent, true, 20_000, Harm::CutOne),
    ] {
        let rule = Rule::in_channel(role, 0, to_target, after, harm);
        let moved = go(&encrypted(), vec![rule], |_| {});
        let report = moved.completed(&format!("{rule:?}"));
        // What a flipped byte hits is never taken for a page.
        assert!(report.postcopy.as_ref().is_none_or(|postcopy| postcopy.damaged == 0), "{rule:?}");
        interrupted += u32::from(report.interruptions > 0);
    }
    assert!(interrupted > 1, "the link was hardly ever lost: {interrupted}");
}
