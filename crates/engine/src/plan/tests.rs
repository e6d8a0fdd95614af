//! Plans of guests whose migrations can be calculated by hand.

use super::*;
use crate::plan::{Content, Costs, CurvePoint, DeltaSample, EncodingSample, Link, MemoryPart, Protection};
use crate::source::PageCodec;
use std::time::Duration;
use vmferry_codec::Level;

const WINDOWS: [f64; 8] = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5];

/// Returns a guest of 1 GiB with 512 MiB of content, of which 128 MiB are written at random.
fn guest(rate: f64) -> Inputs {
    let ws = 32_768.0;
    let written = |t: f64| ws * -(-rate * t / ws).exp_m1();
    let point = |window_s: &f64| CurvePoint { window_s: *window_s, pages: written(*window_s) };
    Inputs {
        memory_pages: 262_144,
        touched_pages: 131_072,
        zero_pages: 0,
        free_pages: 0,
        content: Content::default(),
        vcpus: 1,
        curve: WINDOWS.iter().map(point).collect(),
        run_pages: 1.5,
        parts: (0..8)
            .map(|at| MemoryPart { touched: 16_384.0, dirty: if at < 2 { 16_384.0 } else { 0.0 } })
            .collect(),
        protection: Protection::BeforeRead,
        chunk_pages: 2048,
        link: Link {
            bytes_per_s: 200e6,
            spread: 0.02,
            round_trip_s: 1e-4,
            queue_s: 0.0,
            cpu_page_s: 1e-6,
            connect_s: 2e-4,
            measured: true,
        },
        costs: Costs {
            pause_s: 2e-4,
            quiesce_s: 0.0,
            save_s: 1e-3,
            state_bytes: 1e4,
            harvest_s: 1e-4,
            start_s: 1e-3,
            protect_page_s: 1e-7,
            fault_s: 2.4e-6,
        },
    }
}

fn plan(inputs: Inputs) -> Plan {
    Plan::make(inputs, &Settings { timeout: Some(Duration::from_secs(60)), ..Settings::default() })
}

fn near(got: f64, want: f64, share: f64) {
    assert!((got - want).abs() <= want * share, "{got} and not {want}");
}

#[test]
fn idle_guest_takes_as_long_as_its_memory_takes_on_the_link() {
    let inputs =
        Inputs { curve: WINDOWS.map(|window_s| CurvePoint { window_s, pages: 0.0 }).into(), ..guest(0.0) };
    let plan = plan(inputs);
    let precopy = plan.of(Strategy::Precopy).unwrap();
    assert_eq!((precopy.converges, plan.recommended), (Likelihood::Yes, Strategy::Precopy));
    let total = precopy.total_ms.unwrap();
    near(total.expected, 131_072.0 * 4112.0 / 200e6 * 1e3, 0.05);
    assert!(total.low < total.expected && total.expected < total.high);
    assert!(precopy.downtime_ms.unwrap().expected < 10.0, "{precopy:?}");
    near(precopy.bytes.unwrap().expected, 131_072.0 * 4112.0, 0.02);
}

#[test]
fn free_and_zero_pages_are_not_sent() {
    let inputs = Inputs { zero_pages: 32_768, free_pages: 32_768, ..guest(100.0) };
    near(plan(inputs).of(Strategy::Precopy).unwrap().bytes.unwrap().expected, 65_536.0 * 4112.0, 0.05);
}

#[test]
fn a_modest_guest_converges_and_a_fast_one_does_not() {
    // The link carries 48,600 pages per second.
    for (rate, converges) in [(10_000.0, Likelihood::Yes), (2_000_000.0, Likelihood::No)] {
        let plan = plan(guest(rate));
        let precopy = plan.of(Strategy::Precopy).unwrap();
        assert_eq!(precopy.converges, converges, "{rate}: {precopy:?}");
        assert_eq!(precopy.total_ms.is_some(), converges == Likelihood::Yes);
        for strategy in [Strategy::Postcopy, Strategy::Hybrid] {
            let mode = plan.of(strategy).unwrap();
            assert_eq!(mode.converges, Likelihood::Yes, "{strategy}");
            assert!(mode.total_ms.unwrap().expected < 10_000.0, "{mode:?}");
        }
    }
    let fast = plan(guest(2_000_000.0));
    assert_ne!(fast.recommended, Strategy::Precopy);
    assert!(fast.reason.contains("dirties too much"), "{}", fast.reason);
}

#[test]
fn throttle_makes_a_fast_guest_converge_and_slows_it() {
    // All 128 MiB are written again within each pass of 690 ms.
    let slowed = plan(guest(200_000.0));
    let mode = slowed.of(Strategy::AutoConverge).unwrap();
    assert_eq!(mode.converges, Likelihood::Yes, "{mode:?}");
    assert!(mode.slowdown.unwrap().expected > 0.15, "{mode:?}");
}

#[test]
fn probability_falls_gradually_with_the_dirty_rate() {
    let chances = |rate: f64| plan(guest(rate)).of(Strategy::Precopy).unwrap().probability;
    let all: Vec<f64> = (0..30).map(|step| chances(20_000.0 * 1.1f64.powi(step))).collect();
    assert!(all[0] > 0.99 && all[29] < 0.01, "{all:?}");
    assert!(all.windows(2).all(|pair| pair[1] <= pair[0] + 0.15), "not falling: {all:?}");
}

#[test]
fn equal_inputs_make_equal_plans() {
    assert_eq!(plan(guest(30_000.0)), plan(guest(30_000.0)));
}

#[test]
fn bandwidth_limit_acts_as_the_link_rate() {
    let settings = Settings { max_bandwidth: Some(50_000_000), ..Settings::default() };
    let plan = Plan::make(guest(100.0), &settings);
    near(
        plan.of(Strategy::Precopy).unwrap().total_ms.unwrap().expected,
        131_072.0 * 4112.0 / 50e6 * 1e3,
        0.05,
    );
}

#[test]
fn certainty_names_what_was_not_measured() {
    let said = plan(Inputs { link: Link::given(1e7), ..guest(100.0) }).certainty;
    assert!(said.contains("not measured") && said.contains("extrapolated"), "{said}");
}

/// Returns the content of a guest whose pages LZ4 shrinks to 40 % and Zstandard to 20 %, and whose
/// counters have short deltas.
fn compressible() -> Content {
    Content {
        sampled_pages: 2048,
        lz4: EncodingSample { ratio: 0.4, cpu_page_s: 4e-6, decode_page_s: 1e-6 },
        zstd: EncodingSample { ratio: 0.2, cpu_page_s: 12e-6, decode_page_s: 6e-6 },
        zstd_level: 1,
        delta: DeltaSample { changed_pages: 1000, short_share: 1.0, ratio: 0.01, cpu_page_s: 2e-6 },
        delta_cache_pages: 65_536,
        processors: 2,
        delay: 1.0,
    }
}

fn with_codec(inputs: Inputs, codec: PageCodec, deltas: Deltas) -> ModePlan {
    let settings = Settings { codec, deltas, ..Settings::default() };
    Plan::make(inputs, &settings).of(Strategy::Precopy).unwrap().clone()
}

#[test]
fn codec_divides_bytes_and_time_of_a_slow_link() {
    let inputs = Inputs { content: compressible(), ..guest(100.0) };
    for (codec, ratio, cpu) in [(PageCodec::Lz4, 0.4, 4e-3), (PageCodec::Zstd(Level::MIN), 0.2, 12e-3)] {
        let plan = with_codec(inputs.clone(), codec, Deltas::Off);
        let bytes = 131_072.0 * (4096.0 * ratio + 16.3);
        near(plan.bytes.unwrap().expected, bytes, 0.02);
        // The link limits LZ4, and the processors limit Zstandard. They also send pages.
        let encoding = 131_072.0 * (cpu + 1.1e-3) / 2.0;
        near(plan.total_ms.unwrap().expected, (bytes / 200e6 * 1e3).max(encoding), 0.1);
        near(plan.encoding_cpu_ms.unwrap().expected, 131_072.0 * cpu, 0.02);
    }
    // The slower one of both sides limits the migration, and so does a busy host.
    let time = |decode_page_s: f64, delay: f64| {
        let zstd = EncodingSample { decode_page_s, ..compressible().zstd };
        let content = Content { zstd, delay, ..compressible() };
        let plan = with_codec(Inputs { content, ..inputs.clone() }, PageCodec::Zstd(Level::MIN), Deltas::Off);
        plan.total_ms.unwrap().expected
    };
    near(time(24e-6, 1.0) / time(12e-6, 1.0), 1.9, 0.1);
    near(time(6e-6, 3.0) / time(6e-6, 1.0), 2.7, 0.1);
    let raw = with_codec(inputs.clone(), PageCodec::Raw, Deltas::Off);
    assert_eq!(raw.encoding_cpu_ms.unwrap().expected, 0.0);
    // The source would choose what is fastest.
    let auto = with_codec(inputs, PageCodec::Auto, Deltas::Off).total_ms.unwrap().expected;
    assert!(auto < raw.total_ms.unwrap().expected / 2.0, "{auto}");
}

#[test]
fn fast_link_needs_no_codec_and_a_slow_one_gets_the_smallest() {
    let advice = |rate: f64, content: Content| {
        let link = Link { bytes_per_s: rate, ..guest(0.0).link };
        plan(Inputs { link, content, ..guest(100.0) }).encoding
    };
    let of = |advice: &EncodingAdvice| (advice.codec, advice.deltas);
    let fast = advice(5e9, compressible());
    assert_eq!(of(&fast), (PageCodec::Raw, false), "{fast:?}");
    assert!(fast.reason.contains("LZ4 shrinks the sampled pages to 40 %"), "{fast:?}");
    let slow = advice(12.5e6, compressible());
    assert_eq!(slow.codec, PageCodec::Zstd(Level::MIN), "{slow:?}");
    assert!(slow.reason.contains("processor time"), "{slow:?}");
    let noise = EncodingSample { cpu_page_s: 1e-7, ..EncodingSample::default() };
    let random = Content { lz4: noise, zstd: noise, delta: DeltaSample::default(), ..compressible() };
    assert_eq!(of(&advice(12.5e6, random)), (PageCodec::Raw, false));
    let none = advice(12.5e6, Content::default());
    assert!(none.codec == PageCodec::Raw && none.reason.contains("no page"), "{none:?}");
}

#[test]
fn deltas_let_a_fast_writer_of_counters_converge() {
    let random = EncodingSample { cpu_page_s: 1e-7, ..EncodingSample::default() };
    let content = Content { lz4: random, zstd: random, ..compressible() };
    let inputs = Inputs { content, ..guest(2_000_000.0) };
    let chances = |deltas, cache| {
        let content = Content { delta_cache_pages: cache, ..content };
        let plan = with_codec(Inputs { content, ..inputs.clone() }, PageCodec::Raw, deltas);
        plan.probability
    };
    assert!(chances(Deltas::Off, 65_536) < 0.1);
    assert!(chances(Deltas::On, 65_536) > 0.9 && chances(Deltas::Auto, 65_536) > 0.9);
    // With room for a small part of the dirty pages, most of them are sent as they are.
    assert!(chances(Deltas::On, 1024) < 0.1);
    let advice = plan(inputs).encoding;
    assert!(advice.deltas && advice.reason.starts_with("precopy ends by itself only with it"), "{advice:?}");
}
