//! Migrations over encrypted connections.

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
fn pages_arrive_at_a_running_guest_over_tls() {
    if !can_fault() {
        return;
    }
    let moved = go(&encrypted(), vec![], |_| {});
    let report = moved.completed("encrypted");
    assert_eq!(report.interruptions, 0);
    assert!(report.postcopy.as_ref().is_some_and(|postcopy| postcopy.faults > 0), "{report:?}");
}

/// A cut, or a changed byte, ends an encrypted connection. The link is recovered with encryption,
/// and no page is lost or accepted with damage.
#[test]
fn lost_encrypted_link_is_recovered() {
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
        // A frame that a flipped byte hit is never accepted as a page.
        assert!(report.postcopy.as_ref().is_none_or(|postcopy| postcopy.digest_mismatches == 0), "{rule:?}");
        interrupted += u32::from(report.interruptions > 0);
    }
    assert!(interrupted > 1, "the link was hardly ever lost: {interrupted}");
}
