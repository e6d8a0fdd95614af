//! Tests of the screen with real answers of running guests (`answers/`).

use super::guest::Line;
use super::source::What;
use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::{Value, json};
use std::path::Path;

fn answer(name: &str) -> Value {
    let text = match name {
        "precopy" => include_str!("answers/precopy.json"),
        "target" => include_str!("answers/target.json"),
        _ => include_str!("answers/rings.json"),
    };
    serde_json::from_str(text).unwrap()
}

fn screen(names: &[&str]) -> Screen {
    let mut screen = Screen::default();
    let start = Instant::now();
    for name in names {
        let mut guest = Guest::new(Path::new(&format!("dir/{name}.sock")));
        for step in 0..20u32 {
            let mut status = answer(name);
            if let Some(wire) = status["progress"]["wire_bytes"].as_u64() {
                status["progress"]["wire_bytes"] = json!(wire + u64::from(step) * 1_000_000);
            }
            guest.take(start + step * Duration::from_millis(250), What::Status(Box::new(status)));
        }
        screen.guests.push(guest);
    }
    screen
}

fn later(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

fn drawn(screen: &Screen, (width, height): (u16, u16), now: Instant) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, screen, now)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(row).collect::<Vec<_>>().join("\n")
}

fn press(screen: &mut Screen, code: KeyCode) {
    screen.key(KeyEvent::new(code, KeyModifiers::NONE));
}

#[test]
fn precopy_shows_pass_rates_and_guest_memory() {
    let text = drawn(&screen(&["precopy"]), (120, 40), later(5000));
    for part in [
        "vmferry top",
        "precopy",
        "moving",
        "pass ",
        " left, dirties ",
        "sends 3.8 MiB/s",
        "writes per second",
        "has 96.0 MiB of 96.0 MiB",
        "press d to measure",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn encoded_pages_are_shown_before_and_after_with_their_cpu_time() {
    let mut screen = screen(&["precopy"]);
    assert!(!drawn(&screen, (80, 24), later(5000)).contains("→"));
    let (mut status, encoded) = (answer("precopy"), crate::codecs::tests::document());
    for part in ["codecs", "delta_cache", "known_pages"] {
        status[part] = encoded[part].clone();
    }
    screen.guests[0].take(later(5000), What::Status(Box::new(status)));
    let text = drawn(&screen, (80, 24), later(5100));
    for part in [
        "delta 200.0 MiB → 2.0 MiB, CPU 1.5 s",
        "lz4 100.0 MiB → 40.0 MiB, CPU 250 ms",
        "zstd in vain, CPU 20 ms",
        "target knew 24.0k of 25.6k pages",
        "cache 48.0 MiB: 51.2k hits, 25.6k misses",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    // The rows below are still there.
    assert!(text.contains("dirtied and sent") && text.contains("q quit"), "{text}");
}

#[test]
fn target_shows_fault_latencies() {
    let small = drawn(&screen(&["target"]), (80, 24), later(5000));
    assert!(small.contains("99 % 1688 us"), "{small}");
    let text = drawn(&screen(&["target"]), (120, 40), later(5000));
    for part in ["completed", "waits: mean 135 us, 99 % 1688 us", "running"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn rings_are_shown_for_each_vcpu() {
    let screen = screen(&["rings"]);
    let text = drawn(&screen, (120, 40), later(5000));
    assert!(text.contains("vCPU 0: ") && text.contains("vCPU 1: ") && text.contains("/1024, "), "{text}");
}

#[test]
fn failed_reaper_is_shown_at_the_rings() {
    let mut screen = screen(&["rings"]);
    let mut status = answer("rings");
    status["vm"]["rings"]["reaper"] = serde_json::json!({ "state": "failed", "error": "planted" });
    screen.guests[0].take(later(5000), What::Status(Box::new(status)));
    let text = drawn(&screen, (120, 40), later(5100));
    assert!(text.contains("reaper failed: planted"), "{text}");
}

#[test]
fn every_size_can_be_drawn() {
    let mut screen = screen(&["precopy", "target", "rings"]);
    for help in [false, true] {
        screen.help = help;
        for width in [1, 2, 10, 40, 60, 300] {
            for height in [1, 2, 5, 13, 24, 100] {
                drawn(&screen, (width, height), later(5000));
            }
        }
    }
    let narrow = drawn(&screen, (60, 15), later(5000));
    assert!(narrow.contains("each page that ") && narrow.contains("screen asks "), "{narrow}");
    screen.help = false;
    let narrow = drawn(&screen, (60, 20), later(5000));
    assert!(narrow.contains("precopy") && narrow.contains("q quit"), "{narrow}");
}

#[test]
fn guest_that_ends_or_hangs_is_marked_until_it_answers() {
    let mut screen = screen(&["precopy", "rings"]);
    assert!(drawn(&screen, (120, 30), later(60_000)).contains("no answer for "));
    screen.guests[0].take(later(5000), What::Gone("the process ended".into()));
    let text = drawn(&screen, (120, 30), later(5100));
    assert!(text.contains("gone for 0 s: the process ended"), "{text}");
    let back = later(6000);
    screen.guests[0].take(back, What::Status(Box::new(answer("precopy"))));
    assert!(screen.guests[0].trouble(back).is_none());
    let never = Guest::new(Path::new("x"));
    assert_eq!(never.trouble(back).as_deref(), Some("connecting"));
}

#[test]
fn keys_choose_a_guest_show_help_and_quit() {
    let mut screen = screen(&["precopy", "target"]);
    for (code, chosen) in [(KeyCode::Down, 1), (KeyCode::Tab, 0), (KeyCode::Up, 1), (KeyCode::BackTab, 0)] {
        press(&mut screen, code);
        assert_eq!(screen.chosen, chosen, "{code:?}");
    }
    press(&mut screen, KeyCode::Char('?'));
    assert!(drawn(&screen, (80, 24), later(0)).contains("Ctrl-C   leave"));
    press(&mut screen, KeyCode::Esc);
    assert!(!screen.help && !screen.quit, "Esc closes the help first");
    screen.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(screen.quit);
    press(&mut Screen::default(), KeyCode::Tab);
}

#[test]
fn measured_rate_is_a_curve_and_a_refusal_is_shown() {
    let mut screen = screen(&["precopy"]);
    let windows =
        json!({"windows": [{"window_ms": 50.0, "pages": 100}, {"window_ms": 1000.0, "pages": 900}]});
    screen.guests[0].take(later(0), What::Rate(Ok(windows)));
    assert_eq!(screen.guests[0].rate, Some(Ok(vec![(0.05, 100.0), (1.0, 900.0)])));
    assert!(drawn(&screen, (120, 40), later(5000)).contains("1.0 s"));
    screen.guests[0].take(later(0), What::Rate(Err("the guest is being migrated".into())));
    assert!(drawn(&screen, (120, 40), later(5000)).contains("the guest is being migrated"));
}

#[test]
fn malformed_answers_are_drawn_safely() {
    let mut guest = Guest::new(Path::new("x"));
    for status in [
        json!(null),
        json!([1]),
        json!({"state": 7, "progress": [], "vm": "x", "postcopy": {"hist_us": {"x": 1, "8": -1, "18446744073709551615": 18446744073709551615u64}}}),
        json!({"state": "precopy\u{1b}[2J", "progress": {"pass_done": 1e300, "pass_pages": -1, "dirty_pages_per_s": 1e300, "wire_bytes": 1e300},
            "vm": {"guest": {"writes_per_s": 1e308}, "rings": {"entries": 0, "used": [18446744073709551615u64]}}}),
    ] {
        guest.take(later(0), What::Status(Box::new(status)));
        let screen = Screen { guests: vec![std::mem::take(&mut guest)], ..Screen::default() };
        let text = drawn(&screen, (100, 40), later(100));
        assert!(!text.contains('\u{1b}'), "{text}");
        guest = screen.guests.into_iter().next().unwrap();
    }
    assert!(guest.line(later(100), Line::Writes).len() == 4);
}

/// Subject of `panic_restores_the_terminal_and_is_printed`.
#[test]
#[ignore = "panics on a terminal that another test gives it"]
fn panics() {
    let panicked = Arc::new(AtomicBool::new(false));
    let mut terminal = take_terminal(&panicked).unwrap();
    terminal.draw(|frame| view::draw(frame, &screen(&["precopy"]), later(5000))).unwrap();
    // A panic on any thread must end the screen, which would draw on a terminal that it no longer
    // owns.
    let _ = std::thread::spawn(|| panic!("out of luck")).join();
    assert!(panicked.load(Ordering::Acquire));
    panic!("again");
}

#[test]
fn panic_restores_the_terminal_and_is_printed() {
    let left = crate::on_terminal::run("top::tests::panics");
    assert!(left.as_it_was(), "{:?}\n{:?}\n{}", left.before, left.after, left.text);
    let (entered, gone) = (left.text.find("\u{1b}[?1049h"), left.text.find("\u{1b}[?1049l"));
    assert!(entered.is_some() && entered < gone, "{}", left.text);
    assert!(left.text.find("out of luck") > gone, "{}", left.text);
}
