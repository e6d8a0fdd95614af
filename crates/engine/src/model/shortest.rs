//! Searches for a trace that breaks a promise of a model, and for the shortest one.

use stateright::{Checker, HasDiscoveries, Model};
use std::fmt::Debug;
use std::hash::Hash;

/// Run: states, each with the step that leads to the next state.
pub(crate) type Trace<M> = Vec<(<M as Model>::State, Option<<M as Model>::Action>)>;

/// Returns true if tests must print the shortest traces, for the tables of docs/reliability.md:
/// `VMFERRY_MODEL_SHORTEST=1`. That takes more than a minute.
pub(crate) fn is_wanted() -> bool {
    std::env::var("VMFERRY_MODEL_SHORTEST").is_ok_and(|wanted| wanted == "1")
}

/// Returns a broken promise with a trace to it. A search in depth finds it soon, but the trace is
/// long.
pub(crate) fn any<M>(model: &M) -> Option<(&'static str, Trace<M>)>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Hash + Debug + Clone + PartialEq + Send + Sync + 'static,
    M::Action: Debug + Clone + PartialEq + Send + Sync + 'static,
{
    let checker = model.clone().checker().finish_when(HasDiscoveries::AnyFailures);
    least_failure(model, checker.spawn_dfs().join())
}

/// Returns a broken promise with the shortest trace to it. The checker stops some time after it has
/// found one, so the search is repeated for shorter traces until there is none.
pub(crate) fn shortest<M>(model: &M) -> Option<(&'static str, Trace<M>)>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Hash + Debug + Clone + PartialEq + Send + Sync + 'static,
    M::Action: Debug + Clone + PartialEq + Send + Sync + 'static,
{
    let (mut found, mut depth) = (None, usize::MAX);
    while let Some((property, path)) = less_deep(model, depth) {
        // The depth of a state is one more than the number of steps to it.
        depth = path.len();
        found = Some((property, path));
    }
    found
}

fn less_deep<M>(model: &M, depth: usize) -> Option<(&'static str, Trace<M>)>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Hash + Debug + Clone + PartialEq + Send + Sync + 'static,
    M::Action: Debug + Clone + PartialEq + Send + Sync + 'static,
{
    let checker = model.clone().checker().target_max_depth(depth);
    least_failure(model, checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join())
}

fn least_failure<M: Model>(model: &M, checker: impl Checker<M>) -> Option<(&'static str, Trace<M>)>
where
    M::State: Hash + Debug + Clone + PartialEq,
    M::Action: Debug + Clone + PartialEq,
{
    let found = checker.discoveries();
    // States that must be reached are found too, and are not failures.
    let failed = |name: &str| {
        let of_that_name = |property: &stateright::Property<M>| property.name == name;
        let property = model.properties().into_iter().find(of_that_name);
        property.is_some_and(|property| property.expectation != stateright::Expectation::Sometimes)
    };
    let failures = found.into_iter().filter(|(property, _)| failed(property));
    failures.map(|(property, path)| (property, path.into_vec())).min_by_key(|(_, path)| path.len())
}
