//! QMP's capabilities and parameters of migrations, and their counterparts in vmferry.
//!
//! They apply to the next `migrate`. An option without a counterpart is refused, not ignored.

use super::MigrateRequest;
use crate::choices::{
    AutoConvergeArg, ChannelsArg, CodecArg, DeltaArg, OnTimeoutArg, PaceArg, SwitchoverArg, UrgentArg,
};
use serde_json::{Map, Value, json};
use vmferry_control::{Arguments, QmpError};
use vmferry_engine::{BulkLimit, PageCodec, Settings, ZstdLevel};

/// Longest downtime limit in ms: 2000 s, as in QEMU.
const MOST_DOWNTIME_MS: u64 = 2_000_000;

/// Smallest cache for deltas in bytes. A smaller one has no room for a version on each channel.
const LEAST_CACHE: u64 = 1 << 20;

/// Capabilities, and whether they are on by default.
const CAPABILITIES: [(&str, bool); 9] = [
    ("auto-converge", false),
    ("dirty-limit", false),
    ("events", false),
    ("multifd", false),
    ("postcopy-blocktime", false),
    ("postcopy-preempt", true),
    ("postcopy-ram", false),
    ("return-path", true),
    ("xbzrle", false),
];

/// Settings for the next migration.
#[derive(Debug, Clone)]
pub(super) struct Options {
    on: [bool; CAPABILITIES.len()],
    downtime_limit_ms: u64,
    multifd_channels: u16,
    compression: Compression,
    zstd_level: ZstdLevel,
    /// Memory for deltas in bytes; 0 for the default of the engine.
    cache_size: u64,
    /// Bytes per second; 0 for no limit.
    max_bandwidth: u64,
    /// Bytes per second while the guest is stopped; 0 for `max_bandwidth`.
    switchover_bandwidth: u64,
    /// Bytes per second in postcopy; 0 for the automatic pace that keeps queues short.
    postcopy_bandwidth: u64,
}

/// Values of `multifd-compression`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Zstd,
}

impl Compression {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
        }
    }

    /// Returns the compression with the name `value`.
    fn read(value: &Value) -> Result<Self, QmpError> {
        match value.as_str() {
            Some("none") => Ok(Self::None),
            Some("zstd") => Ok(Self::Zstd),
            _ => Err(QmpError::generic(format!(
                "Parameter 'multifd-compression' does not accept value {value}; it accepts none and zstd"
            ))),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        let settings = Settings::default();
        Self {
            on: CAPABILITIES.map(|(_, on)| on),
            downtime_limit_ms: u64::try_from(settings.downtime_limit.as_millis()).unwrap_or(MOST_DOWNTIME_MS),
            multifd_channels: settings.channels,
            compression: Compression::None,
            zstd_level: ZstdLevel::MIN,
            cache_size: 0,
            max_bandwidth: 0,
            switchover_bandwidth: 0,
            postcopy_bandwidth: 0,
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct SetCapabilities {
    capabilities: Vec<Capability>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Capability {
    capability: String,
    state: bool,
}

impl Options {
    /// Returns whether capability `name` is on.
    pub(super) fn has(&self, name: &str) -> bool {
        CAPABILITIES.iter().zip(&self.on).any(|((own, _), on)| *own == name && *on)
    }

    /// Executes `query-migrate-capabilities`.
    pub(super) fn capabilities(&self) -> Value {
        let each = CAPABILITIES.iter().zip(&self.on);
        each.map(|((name, _), on)| json!({ "capability": name, "state": on })).collect()
    }

    /// Executes `migrate-set-capabilities`. Sets all or none.
    pub(super) fn set_capabilities(&mut self, arguments: Arguments) -> Result<(), QmpError> {
        let wanted: SetCapabilities = arguments.read()?;
        let mut on = self.on;
        for Capability { capability, state } in wanted.capabilities {
            let known = CAPABILITIES.iter().position(|(name, _)| *name == capability);
            on[known.ok_or_else(|| {
                unknown("capability", &capability, CAPABILITIES.iter().map(|(name, _)| *name))
            })?] = state;
        }
        let changed = Self { on, ..self.clone() };
        if changed.has("auto-converge") && changed.has("dirty-limit") {
            return Err(QmpError::generic(
                "auto-converge slows all vCPUs and dirty-limit those that write most; switch on one of them",
            ));
        }
        if !changed.has("return-path") {
            return Err(QmpError::generic("return-path is always on: the target answers in every migration"));
        }
        *self = changed;
        Ok(())
    }

    /// Executes `query-migrate-parameters`.
    pub(super) fn parameters(&self) -> Value {
        json!({
            "avail-switchover-bandwidth": self.switchover_bandwidth,
            "downtime-limit": self.downtime_limit_ms,
            "max-bandwidth": self.max_bandwidth,
            "max-postcopy-bandwidth": self.postcopy_bandwidth,
            "mode": "normal",
            "multifd-channels": self.multifd_channels,
            "multifd-compression": self.compression.name(),
            "multifd-zstd-level": self.zstd_level.get(),
            "xbzrle-cache-size": self.cache_size,
        })
    }

    /// Executes `migrate-set-parameters`. Sets all or none.
    pub(super) fn set_parameters(&mut self, arguments: Arguments) -> Result<(), QmpError> {
        let mut changed = self.clone();
        for (name, value) in &arguments.0 {
            changed.set_parameter(name, value)?;
        }
        *self = changed;
        Ok(())
    }

    fn set_parameter(&mut self, name: &str, value: &Value) -> Result<(), QmpError> {
        match name {
            "downtime-limit" => self.downtime_limit_ms = number(name, value, 0, MOST_DOWNTIME_MS)?,
            "max-bandwidth" => self.max_bandwidth = number(name, value, 0, u64::MAX)?,
            "max-postcopy-bandwidth" => self.postcopy_bandwidth = number(name, value, 0, u64::MAX)?,
            "avail-switchover-bandwidth" => self.switchover_bandwidth = number(name, value, 0, u64::MAX)?,
            "multifd-channels" => {
                let channels = number(name, value, 1, Settings::MAX_CHANNELS.into())?;
                self.multifd_channels = u16::try_from(channels).unwrap_or(Settings::MAX_CHANNELS);
            }
            "multifd-compression" => self.compression = Compression::read(value)?,
            "multifd-zstd-level" => {
                let (least, most) = (ZstdLevel::MIN.get(), ZstdLevel::MAX.get());
                let level = number(name, value, least.into(), most.into())?;
                self.zstd_level = u8::try_from(level).ok().and_then(ZstdLevel::new).unwrap_or(ZstdLevel::MAX);
            }
            "xbzrle-cache-size" if value == 0 => self.cache_size = 0,
            "xbzrle-cache-size" => self.cache_size = number(name, value, LEAST_CACHE, u64::MAX)?,
            // This is the only supported value.
            "mode" if value == "normal" => {}
            "mode" => {
                return Err(QmpError::generic(format!("Parameter '{name}' does not accept value {value}")));
            }
            _ => {
                let names: Vec<_> =
                    self.parameters().as_object().into_iter().flat_map(Map::keys).cloned().collect();
                return Err(unknown("parameter", name, names.iter().map(String::as_str)));
            }
        }
        Ok(())
    }

    /// Returns a request for a migration to `uri` with these settings. Connections to other hosts
    /// are not encrypted, and need `insecure`.
    pub(super) fn request(&self, uri: &str, insecure: bool) -> MigrateRequest {
        let limit = |rate: u64| (rate > 0).then_some(rate);
        MigrateRequest {
            // The request has no timeout, so the switch only happens on `migrate-start-postcopy`.
            on_timeout: if self.has("postcopy-ram") { OnTimeoutArg::Postcopy } else { OnTimeoutArg::Cancel },
            urgent: if self.has("postcopy-preempt") { UrgentArg::Dedicated } else { UrgentArg::Shared },
            pace: PaceArg(limit(self.postcopy_bandwidth).map_or(BulkLimit::Auto, BulkLimit::Rate)),
            channels: ChannelsArg::Count(if self.has("multifd") { self.multifd_channels } else { 1 }),
            downtime_limit_ms: self.downtime_limit_ms,
            max_bandwidth: limit(self.max_bandwidth),
            switchover_bandwidth: limit(self.switchover_bandwidth).map(SwitchoverArg::AtMost),
            auto_converge: match () {
                () if self.has("dirty-limit") => AutoConvergeArg::Writers,
                () if self.has("auto-converge") => AutoConvergeArg::All,
                () => AutoConvergeArg::Off,
            },
            codec: CodecArg(match self.compression {
                Compression::None => PageCodec::Raw,
                Compression::Zstd => PageCodec::Zstd(self.zstd_level),
            }),
            delta: if self.has("xbzrle") { DeltaArg::On } else { DeltaArg::Off },
            delta_cache: (self.cache_size > 0).then_some(self.cache_size),
            insecure,
            ..MigrateRequest::to(uri)
        }
    }
}

fn number(name: &str, value: &Value, least: u64, most: u64) -> Result<u64, QmpError> {
    let number = value.as_u64().ok_or_else(|| {
        QmpError::generic(format!("Invalid parameter type for '{name}', expected: integer"))
    })?;
    if (least..=most).contains(&number) {
        return Ok(number);
    }
    Err(QmpError::generic(format!("Parameter '{name}' expects a value between {least} and {most}")))
}

fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> QmpError {
    let name: String = name.chars().take(80).collect();
    let known = known.collect::<Vec<_>>().join(", ");
    QmpError::generic(format!("vmferry has no migration {what} '{name}'; it has {known}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_engine::{AutoConverge, Deltas, MigrationMode, OnTimeout, UrgentPath};

    fn arguments(value: Value) -> Arguments {
        match value {
            Value::Object(map) => Arguments(map),
            _ => Arguments::default(),
        }
    }

    fn with(options: &mut Options, names: &[(&str, bool)]) -> Result<(), QmpError> {
        let list: Value = names.iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
        options.set_capabilities(arguments(json!({ "capabilities": list })))
    }

    #[test]
    fn engine_gets_the_values_that_were_set() {
        let mut options = Options::default();
        let settings = options.request("tcp:a:1", false).settings(None).unwrap();
        assert_eq!((settings.channels, settings.on_timeout, settings.timeout), (1, OnTimeout::Cancel, None));
        assert_eq!((settings.max_bandwidth, settings.insecure), (None, false));
        with(
            &mut options,
            &[("multifd", true), ("postcopy-ram", true), ("dirty-limit", true), ("events", true)],
        )
        .unwrap();
        let rates =
            json!({"max-bandwidth": 1000, "max-postcopy-bandwidth": 500, "avail-switchover-bandwidth": 2000});
        options.set_parameters(arguments(rates)).unwrap();
        options.set_parameters(arguments(json!({"multifd-channels": 5, "downtime-limit": 20}))).unwrap();
        let settings = options.request("tcp:a:1", true).settings(None).unwrap();
        assert_eq!((settings.channels, settings.downtime_limit.as_millis()), (5, 20));
        assert_eq!((settings.mode, settings.on_timeout), (MigrationMode::Precopy, OnTimeout::Postcopy));
        assert_eq!((settings.auto_converge, settings.urgent), (AutoConverge::Writers, UrgentPath::Dedicated));
        assert_eq!((settings.max_bandwidth, settings.pace), (Some(1000), BulkLimit::Rate(500)));
        assert!(settings.insecure && settings.switchover_bandwidth.is_some());
        with(&mut options, &[("postcopy-preempt", false), ("dirty-limit", false), ("auto-converge", true)])
            .unwrap();
        let settings = options.request("tcp:a:1", true).settings(None).unwrap();
        assert_eq!((settings.auto_converge, settings.urgent), (AutoConverge::All, UrgentPath::Shared));
    }

    #[test]
    fn compression_and_xbzrle_are_codec_and_deltas() {
        let mut options = Options::default();
        let plain = options.request("tcp:a:1", false).settings(None).unwrap();
        assert_eq!((plain.codec, plain.deltas, plain.delta_cache), (PageCodec::Raw, Deltas::Off, None));
        let parameters = options.parameters();
        assert_eq!(parameters["multifd-compression"], "none");
        assert_eq!(
            (&parameters["multifd-zstd-level"], &parameters["xbzrle-cache-size"]),
            (&json!(1), &json!(0))
        );
        with(&mut options, &[("multifd", true), ("xbzrle", true)]).unwrap();
        let set =
            json!({"multifd-compression": "zstd", "multifd-zstd-level": 7, "xbzrle-cache-size": 3 << 20});
        options.set_parameters(arguments(set.clone())).unwrap();
        for (name, value) in set.as_object().unwrap() {
            assert_eq!(options.parameters()[name], *value);
        }
        let on = options
            .capabilities()
            .as_array()
            .unwrap()
            .contains(&json!({"capability": "xbzrle", "state": true}));
        assert!(on, "{}", options.capabilities());
        let settings = options.request("tcp:a:1", false).settings(None).unwrap();
        assert_eq!(settings.codec, PageCodec::Zstd(ZstdLevel::new(7).unwrap()));
        assert_eq!((settings.deltas, settings.delta_cache), (Deltas::On, Some(3 << 20)));
        options
            .set_parameters(arguments(json!({"multifd-compression": "none", "xbzrle-cache-size": 0})))
            .unwrap();
        with(&mut options, &[("xbzrle", false)]).unwrap();
        let settings = options.request("tcp:a:1", false).settings(None).unwrap();
        assert_eq!(
            (settings.codec, settings.deltas, settings.delta_cache),
            (PageCodec::Raw, Deltas::Off, None)
        );
    }

    #[test]
    fn zlib_is_refused_with_the_name_of_what_exists() {
        let mut options = Options::default();
        for name in ["zlib", "qpl", "lz4"] {
            let wrong = json!({ "multifd-compression": name });
            let error = options.set_parameters(arguments(wrong)).unwrap_err();
            let says = format!("Parameter 'multifd-compression' does not accept value \"{name}\"");
            assert!(error.desc.starts_with(&says) && error.desc.contains("zstd"), "{error}");
        }
        let error = options.set_parameters(arguments(json!({"multifd-zlib-level": 3}))).unwrap_err();
        assert!(error.desc.contains("vmferry has no migration parameter 'multifd-zlib-level'"), "{error}");
    }

    #[test]
    fn unsupported_values_are_refused_and_change_nothing() {
        let mut options = Options::default();
        let before = (options.capabilities(), options.parameters());
        for names in [
            &[("multifd", true), ("mapped-ram", true)][..],
            &[("events", true), ("auto-converge", true), ("dirty-limit", true)],
            &[("return-path", false)],
        ] {
            let error = with(&mut options, names).unwrap_err();
            assert!(error.desc.contains("it has auto-converge") || error.desc.contains("on"), "{error}");
        }
        for wrong in [
            json!({"max-bandwidth": 5, "cpu-throttle-initial": 3}),
            json!({"downtime-limit": 2_000_001}),
            json!({"multifd-channels": 0}),
            json!({"max-bandwidth": "1G"}),
            json!({"max-bandwidth": -1}),
            json!({"mode": "cpr-reboot"}),
            json!({"multifd-compression": "zlib"}),
            json!({"multifd-compression": 1}),
            json!({"multifd-compression": "zstd", "multifd-zstd-level": 0}),
            json!({"multifd-zstd-level": 20}),
            json!({"xbzrle-cache-size": 4096}),
        ] {
            assert!(options.set_parameters(arguments(wrong.clone())).is_err(), "{wrong}");
        }
        assert_eq!((options.capabilities(), options.parameters()), before);
    }
}
