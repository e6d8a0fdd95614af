//! Lists of system calls, from which filters are compiled.

#[cfg(test)]
use super::names;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// Condition on an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Must {
    /// `argument & mask == value` holds for the low 32 bits of the argument. The kernel reads only
    /// these bits in the calls that have conditions.
    Have { argument: u8, mask: u64, value: u64 },
    /// The low 32 bits of the argument differ from `value`.
    Differ { argument: u8, value: u64 },
}

/// List of system calls. A call without conditions is on the list with any arguments. A call with
/// conditions is on the list if at least one of them holds. The filter tries the conditions in
/// their order.
#[derive(Debug, Clone, Default)]
pub(super) struct Policy(BTreeMap<i64, Vec<Must>>);

impl Policy {
    /// Adds `calls` with any arguments.
    pub(super) fn any(mut self, calls: &[i64]) -> Self {
        self.0.extend(calls.iter().map(|call| (*call, Vec::new())));
        self
    }

    /// Adds `call` under the condition `must`. Changes nothing if the list already has `call` with
    /// any arguments.
    pub(super) fn when(mut self, call: i64, must: Must) -> Self {
        let fresh = !self.0.contains_key(&call);
        let rules = self.0.entry(call).or_default();
        if fresh || !rules.is_empty() && !rules.contains(&must) {
            rules.push(must);
        }
        self
    }

    /// Adds `call` for each of `values`, under the condition that the bits of `argument` in `mask`
    /// have this value.
    pub(super) fn each(mut self, call: i64, (argument, mask): (u8, u64), values: &[u64]) -> Self {
        for value in values {
            self = self.when(call, Must::Have { argument, mask, value: *value });
        }
        self
    }

    /// Adds all calls of `other`.
    pub(super) fn and(mut self, other: Self) -> Self {
        for (call, rules) in other.0 {
            if rules.is_empty() {
                self.0.insert(call, rules);
            } else {
                for must in rules {
                    self = self.when(call, must);
                }
            }
        }
        self
    }

    /// Returns a description of each call that this list allows and `other` does not.
    #[cfg(test)]
    pub(super) fn beyond(&self, other: &Self) -> Vec<String> {
        let within = |call: &i64, rules: &Vec<Must>| {
            let Some(theirs) = other.0.get(call) else { return false };
            theirs.is_empty() || !rules.is_empty() && rules.iter().all(|must| theirs.contains(must))
        };
        let beyond = self.0.iter().filter(|(call, rules)| !within(call, rules));
        beyond.map(|(call, rules)| format!("{} {rules:x?}", names::name(*call).unwrap_or("?"))).collect()
    }

    /// Returns the names of the calls.
    #[cfg(test)]
    pub(super) fn names(&self) -> std::collections::BTreeSet<&'static str> {
        self.0.keys().map(|call| names::name(*call).expect("a call with a name")).collect()
    }

    /// Returns the list in the form that `seccompiler` takes.
    pub(super) fn rules(self) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
        let chain = |(call, rules): (i64, Vec<Must>)| {
            let rules = rules.iter().map(|must| SeccompRule::new(vec![must.condition()?]));
            Ok((call, rules.collect::<Result<Vec<_>, _>>()?))
        };
        self.0.into_iter().map(chain).collect()
    }
}

impl Must {
    fn condition(&self) -> Result<SeccompCondition, seccompiler::BackendError> {
        let (argument, op, value) = match *self {
            Self::Have { argument, mask, value } => (argument, SeccompCmpOp::MaskedEq(mask), value),
            Self::Differ { argument, value } => (argument, SeccompCmpOp::Ne, value),
        };
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
    }
}
