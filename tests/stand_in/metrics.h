// Gauges on Triton's metrics endpoint: the backend's own families, and what the stand-in counts.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "requests.h"
#include "triton.h"

class Gauges {
 public:
  // A server without metrics refuses families: then nothing is reported.
  Gauges(const std::string& family, const std::string& label, const std::string& model,
         const std::vector<std::string>& kinds)
  {
    if (TRITONSERVER_Error* error = TRITONSERVER_MetricFamilyNew(
            &family_, TRITONSERVER_METRIC_KIND_GAUGE, family.c_str(), family.c_str())) {
      TRITONSERVER_ErrorDelete(error);
      family_ = nullptr;
      return;
    }
    for (const std::string& kind : kinds) metrics_[kind] = add(label, kind, model);
  }

  Gauges(const Gauges&) = delete;
  Gauges& operator=(const Gauges&) = delete;

  ~Gauges()
  {
    for (const auto& [kind, metric] : metrics_) ignore(TRITONSERVER_MetricDelete(metric));
    if (family_ != nullptr) ignore(TRITONSERVER_MetricFamilyDelete(family_));
  }

  void set(const std::string& kind, double value)
  {
    const auto metric = metrics_.find(kind);
    if (metric != metrics_.end()) ignore(TRITONSERVER_MetricSet(metric->second, value));
  }

 private:
  TRITONSERVER_Metric* add(
      const std::string& label, const std::string& kind, const std::string& model)
  {
    const TRITONSERVER_Parameter* labels[] = {
        text("model", model), text("version", "1"), text(label, kind)};
    TRITONSERVER_Metric* metric = nullptr;
    require(TRITONSERVER_MetricNew(&metric, family_, labels, 3));
    for (const TRITONSERVER_Parameter* parameter : labels)
      TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
    return metric;
  }

  static TRITONSERVER_Parameter* text(const std::string& name, const std::string& value)
  {
    return TRITONSERVER_ParameterNew(
        name.c_str(), TRITONSERVER_PARAMETER_STRING, value.c_str());
  }

  TRITONSERVER_MetricFamily* family_ = nullptr;
  std::map<std::string, TRITONSERVER_Metric*> metrics_;
};
