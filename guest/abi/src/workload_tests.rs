//! Tests of the specification.

use super::*;
use proptest::prelude::*;
use std::string::ToString;

#[test]
fn parses_the_example_of_the_contract() {
    let workload: Workload = "uniform,ws=256M,rate=100k,fill=random".parse().unwrap();
    assert_eq!(workload.pattern, Pattern::Uniform);
    assert_eq!(workload.ws, Some(256 << 20));
    assert_eq!(workload.rate, 100_000);
    assert_eq!(workload.fill, Fill::Random);
    assert_eq!(workload.data, None);
}

#[test]
fn parses_every_pattern_fill_and_write() {
    for text in ["idle", "uniform", "sequential", "zipf:0.99", "zipf:1"] {
        assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
    }
    for part in ["fill=zero", "fill=text", "fill=pointers", "fill=mix:30", "write=append", "write=whole"] {
        let text = std::format!("uniform,{part}");
        assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
    }
    assert_eq!("uniform,write=counter".parse::<Workload>(), "uniform".parse());
}

#[test]
fn allocations_are_parsed_and_printed() {
    for text in ["idle,alloc=4G", "uniform,ws=64M,alloc=1G,rounds=3", "idle,alloc=4G,rounds=1,frag=64"] {
        assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
    }
    let workload: Workload = "idle,frag=64,alloc=1G,rounds=0".parse().unwrap();
    assert_eq!(workload.alloc, Some(Allocation { bytes: 1 << 30, rounds: 0, frag: 64 }));
}

#[test]
fn each_vcpu_is_slower_than_the_one_before_by_the_skew() {
    let rates = |text: &str| {
        let workload: Workload = text.parse().unwrap();
        [0, 1, 2, 63].map(|cpu| workload.rate_of(cpu))
    };
    assert_eq!(rates("uniform,rate=100k,skew=4"), [100_000, 25_000, 6_250, 1]);
    assert_eq!(rates("uniform,rate=100k"), [100_000; 4]);
    assert_eq!(rates("uniform"), [0; 4]);
}

#[test]
fn refuses_with_the_reason() {
    let cases = [
        ("", "is no pattern; use idle"),
        ("unifrom", "'unifrom' is no pattern"),
        ("zipf", "is no exponent"),
        ("zipf:0", "'0' is no exponent"),
        ("zipf:nan", "'nan' is no exponent"),
        ("uniform:1", "is no pattern"),
        ("uniform,ws=1", "ws=1 cannot be used; use a size of at least 4K"),
        ("uniform,ws=256M,ws=1G", "ws= is given twice"),
        ("uniform,rate=fast", "rate=fast cannot be used"),
        ("uniform,rate=10k,skew=0", "skew=0 cannot be used; use a whole number from 1 to 1000"),
        ("uniform,skew=4", "skew= divides a rate"),
        ("uniform,burst=9", "burst=9 cannot be used; use a whole number of milliseconds"),
        ("uniform,burst=1s", "burst=1s cannot be used"),
        ("idle,burst=500", "burst= divides the time of a pattern that writes"),
        ("uniform,write=half", "write=half cannot be used; use counter, append or whole"),
        ("uniform,fill=mix:101", "fill=mix:101 cannot be used"),
        ("uniform,speed=1", "'speed=1' is not KEY=VALUE"),
        ("uniform,", "'' is not KEY=VALUE"),
        ("uniform,ws=1G,data=1M", "less than the working set"),
        ("uniform,alloc=4G", "give ws= too, or use idle"),
        ("idle,alloc=1", "alloc=1 cannot be used"),
        ("idle,rounds=1", "rounds= needs alloc="),
        ("idle,frag=64", "frag= needs alloc="),
        ("idle,alloc=4G,frag=1", "frag=1 cannot be used; use a whole number from 2 to 1024"),
        ("idle,alloc=4G,rounds=-1", "rounds=-1 cannot be used"),
    ];
    for (text, reason) in cases {
        let error = text.parse::<Workload>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused(text in "\\PC{0,60}") {
        let _ = text.parse::<Workload>();
    }

    #[test]
    fn print_then_parse_is_the_same(
        pattern in prop_oneof![
            Just(Pattern::Idle), Just(Pattern::Uniform), Just(Pattern::Sequential),
            (0.001f64..8.0).prop_map(|theta| Pattern::Zipf(Theta::new(theta).unwrap())),
        ],
        ws in proptest::option::of(4096u64..1 << 45),
        more in proptest::option::of(0u64..1 << 45),
        rate in prop_oneof![Just(0), 1u64..1 << 40],
        fill in prop_oneof![
            Just(Fill::Random), Just(Fill::Zero), Just(Fill::Text), Just(Fill::Pointers),
            (0u8..=100).prop_map(Fill::Mix),
        ],
        write in prop_oneof![Just(Write::Counter), Just(Write::Append), Just(Write::Whole)],
        sweep in proptest::option::of(0u64..1 << 30),
        skew in 1u64..=1000,
        burst_ms in prop_oneof![Just(0), 10u64..=60_000],
        alloc in proptest::option::of((4096u64..1 << 45, 0u64..9, prop_oneof![Just(0), 2u64..=1024])),
    ) {
        let data = more.map(|more| ws.unwrap_or(4096) + more);
        let skew = if rate == 0 { 1 } else { skew };
        let burst_ms = if pattern == Pattern::Idle { 0 } else { burst_ms };
        let fits = pattern == Pattern::Idle || ws.or(data).is_some();
        let alloc = alloc.filter(|_| fits).map(|(bytes, rounds, frag)| Allocation { bytes, rounds, frag });
        let workload = Workload { pattern, ws, data, rate, skew, burst_ms, write, fill, sweep, alloc };
        prop_assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
    }
}
