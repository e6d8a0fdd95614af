//! A list of system calls, on the way to a filter.

#[cfg(test)]
use super::names;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// What an argument has to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Must {
    /// `argument & mask == value`, of its low 32 bits, which is all that the kernel looks at in these calls.
    Have { argument: u8, mask: u64, value: u64 },
    /// Its low 32 bits are not this.
    Differ { argument: u8, value: u64 },
}

/// A list. A call is in it with any arguments, or with those that fit one of its conditions, which are tried in their order.
#[derive(Debug, Clone, Default)]
pub(super) struct Policy(BTreeMap<i64, Vec<Must>>);

impl Policy {
    /// Adds `calls`, whatever their arguments.
    pub(super) fn any(mut self, calls: &[i64]) -> Self {
        self.0.extend(calls.iter().map(|call| (*call, Vec::new())));
        self
    }

    /// Adds `call` if its arguments fit; nothing if it is there with any.
    pub(super) fn when(mut self, call: i64, must: Must) -> Self {
        let fresh = !self.0.contains_key(&call);
        let rules = self.0.entry(call).or_default();
        if fresh || !rules.is_empty() && !rules.contains(&must) {
            rules.push(must);
        }
        self
    }

    /// Adds `call` with each of `values` as `argument`, under `mask`.
    pub(super) fn each(mut self, call: i64, (argument, mask): (u8, u64), values: &[u64]) -> Self {
        for value in values {
            self = self.when(call, Must::Have { argument, mask, value: *value });
        }
        self
    }

    /// Adds all that is in `other`.
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

    /// What is in this list and not in `other`, in words.
    #[cfg(test)]
    pub(super) fn beyond(&self, other: &Self) -> Vec<String> {
        let within = |call: &i64, rules: &Vec<Must>| {
            let Some(theirs) = other.0.get(call) else { return false };
            theirs.is_empty() || !rules.is_empty() && rules.iter().all(|must| theirs.contains(must))
        };
        let beyond = self.0.iter().filter(|(call, rules)| !within(call, rules));
        beyond.map(|(call, rules)| format!("{} {rules:x?}", names::name(*call).unwrap_or("?"))).collect()
    }

    /// The names of its calls.
    #[cfg(test)]
    pub(super) fn names(&self) -> std::collections::BTreeSet<&'static str> {
        self.0.keys().map(|call| names::name(*call).expect("a call with a name")).collect()
    }

    /// As the library takes it.
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
