//! The shortest way to break a promise of a model.

use stateright::{Checker, HasDiscoveries, Model};
use std::fmt::Debug;
use std::hash::Hash;

/// A run: states, with the step that each was left by.
pub(crate) type Trace<M> = Vec<(<M as Model>::State, Option<<M as Model>::Action>)>;

/// What is broken, and the shortest way there. The checker stops some time after it has found one, so it is asked for ever shorter
/// ones, until there is none.
pub(crate) fn shortest<M>(model: &M) -> Option<(&'static str, Trace<M>)>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Hash + Debug + Clone + PartialEq + Send + Sync + 'static,
    M::Action: Debug + Clone + PartialEq + Send + Sync + 'static,
{
    let (mut found, mut depth) = (None, usize::MAX);
    while let Some((property, path)) = less_deep(model, depth) {
        // A state is one deeper than the steps to it are many.
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
    let found = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join().discoveries();
    // What is to be reached is found too, and is no failure.
    let failed = |name: &str| {
        let of_that_name = |property: &stateright::Property<M>| property.name == name;
        let property = model.properties().into_iter().find(of_that_name);
        property.is_some_and(|property| property.expectation != stateright::Expectation::Sometimes)
    };
    let failures = found.into_iter().filter(|(property, _)| failed(property));
    failures.map(|(property, path)| (property, path.into_vec())).min_by_key(|(_, path)| path.len())
}
