//! QMP commands for the dirty rate: one starts a measurement, another reads the result.

use super::machine::Api;
use super::migration::refused;
use super::{DirtyRateRequest, GuestPlace, Order};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use vmferry_control::{Answer, Arguments, QmpError};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unit {
    #[default]
    Second,
    Millisecond,
}

impl Unit {
    const fn millis(self) -> u64 {
        match self {
            Self::Second => 1000,
            Self::Millisecond => 1,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Millisecond => "millisecond",
        }
    }
}

/// Requested method. Every page is observed with each method; the result names the tracker that was
/// used.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    PageSampling,
    DirtyRing,
    DirtyBitmap,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Calc {
    calc_time: u64,
    #[serde(default)]
    calc_time_unit: Unit,
    #[serde(rename = "sample-pages")]
    _sample_pages: Option<u64>,
    mode: Option<Way>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Query {
    #[serde(default)]
    calc_time_unit: Unit,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Limit {
    cpu_index: Option<usize>,
    /// Limit in MiB per second.
    dirty_rate: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CancelLimit {
    cpu_index: Option<usize>,
}

#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Unstarted,
    Measuring,
    /// Result of the measurement.
    Measured(Value),
}

/// Latest measurement.
#[derive(Debug, Default)]
pub(super) struct Measurement(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: State,
    /// Seconds since 1970.
    began: u64,
    window_ms: u64,
}

impl Measurement {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Api {
    /// Executes `calc-dirty-rate`, which starts a measurement and does not wait for its end.
    pub(super) fn calc_dirty_rate(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let calc: Calc = arguments.read()?;
        let window_ms = calc.calc_time.saturating_mul(calc.calc_time_unit.millis());
        let longest = crate::dirty_rate::LONGEST;
        if !(50..=u64::try_from(longest.as_millis()).unwrap_or(u64::MAX)).contains(&window_ms) {
            return Err(QmpError::generic(format!(
                "calc-time: 50 ms to {} s can be measured",
                longest.as_secs()
            )));
        }
        if self.0.place() != GuestPlace::Running {
            return Err(QmpError::generic("the guest does not run in this process, so it dirties no memory"));
        }
        let tracker = match calc.mode {
            Some(Way::DirtyRing) => Some("ring".to_owned()),
            Some(Way::DirtyBitmap | Way::PageSampling) | None => None,
        };
        let request = DirtyRateRequest { windows_ms: vec![window_ms], tracker, reaper: None };
        let mut inner = self.0.measurement.lock();
        if matches!(inner.state, State::Measuring) {
            return Err(QmpError::generic("Dirty rate is still measuring, please come again later"));
        }
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        *inner = Inner { state: State::Measuring, began, window_ms };
        drop(inner);
        let shared = Arc::clone(&self.0);
        let measure = move || {
            let state = match shared.order(Order::DirtyRate(request)) {
                Ok(result) => State::Measured(result),
                Err(error) => {
                    tracing::warn!("the dirty rate was not measured: {error:#}");
                    State::Unstarted
                }
            };
            shared.measurement.lock().state = state;
        };
        let started = vmferry_thread::spawn(vmferry_thread::Role::Api, "calc-dirty-rate", measure);
        started.map_err(|error| {
            self.0.measurement.lock().state = State::Unstarted;
            refused(error.into())
        })?;
        Ok(Answer::done())
    }

    /// Executes `query-dirty-rate`.
    pub(super) fn query_dirty_rate(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Query { calc_time_unit: unit } = arguments.read()?;
        let inner = self.0.measurement.lock();
        let mut answer = json!({
            "status": "unstarted",
            "start-time": inner.began,
            "calc-time": inner.window_ms / unit.millis(),
            "calc-time-unit": unit.name(),
            "sample-pages": 0,
            "mode": "dirty-bitmap",
        });
        match &inner.state {
            State::Unstarted => {}
            State::Measuring => answer["status"] = json!("measuring"),
            State::Measured(result) => {
                answer["status"] = json!("measured");
                let row = &result["windows"][0];
                answer["dirty-rate"] = mebibytes(&row["bytes_per_s"]);
                if result["tracker"] == "ring" {
                    answer["mode"] = json!("dirty-ring");
                    answer["vcpu-dirty-rate"] = of_vcpus(&row["vcpu_pages_per_s"]);
                }
            }
        }
        Ok(answer.into())
    }
}

impl Api {
    /// Executes `set-vcpu-dirty-limit`.
    pub(super) fn set_limit(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Limit { cpu_index: cpu, dirty_rate } = arguments.read()?;
        if dirty_rate == 0 {
            return Err(QmpError::generic("Parameter 'dirty-rate' expects at least 1 (MB/s)"));
        }
        let limit = Some(f64::from(dirty_rate) * f64::from(1 << 20));
        self.0.order(Order::Limit { cpu, limit }).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes `cancel-vcpu-dirty-limit`.
    pub(super) fn cancel_limit(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let CancelLimit { cpu_index: cpu } = arguments.read()?;
        self.0.order(Order::Limit { cpu, limit: None }).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes `query-vcpu-dirty-limit`.
    pub(super) fn query_limits(&self) -> Value {
        let each = self.0.limited().into_iter().map(|limited| {
            json!({
                "cpu-index": limited.cpu,
                "limit-rate": mebibytes(&json!(limited.limit)),
                "current-rate": mebibytes(&json!(limited.rate)),
            })
        });
        each.collect()
    }
}

/// Returns whole MiB per second, which QMP calls MB/s.
fn mebibytes(bytes_per_s: &Value) -> Value {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
    let whole = (bytes_per_s.as_f64().unwrap_or(0.0) / f64::from(1 << 20)).clamp(0.0, 1e15).round() as u64;
    json!(whole)
}

fn of_vcpus(rates: &Value) -> Value {
    let rates = rates.as_array().into_iter().flatten();
    let bytes = rates.map(|pages| json!(pages.as_f64().unwrap_or(0.0) * 4096.0));
    bytes.enumerate().map(|(id, bytes)| json!({ "id": id, "dirty-rate": mebibytes(&bytes) })).collect()
}
